"""Local ranks: child processes of this one, on its machine.

Their channels are pipes that only the two processes have. The model goes to them as a pickle, which its
classes may need; everything later is a message of `rank_messages`.
"""

import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.ranks.rank_group import LOOPBACK, RankGroup, file_store
from trocar_server.training.fit.ranks.rank_launch import RankJob, RankLostError


class LocalLauncher:
    """Starts ranks as child processes; see `RankLauncher`.

    Args:
        scratch_dir: Parent of the folder with their spools and their rendezvous.
    """

    def __init__(self, scratch_dir: Path) -> None:
        self._scratch_dir = scratch_dir

    def room_problem(self, size: int) -> str:
        """Say why there can never be so many; see `RankLauncher`."""
        available = cpu_count()
        return f"{size} is more than the {available} CPUs that the server may use" if size > available else ""

    def launch(self, job: RankJob, size: int, guard: PassGuard) -> "LocalRanks":
        """Start the ranks from 1; see `RankLauncher`."""
        guard.check()
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        ranks = LocalRanks(Path(tempfile.mkdtemp(prefix="ranks-", dir=self._scratch_dir)), size)
        try:
            ranks.start()
            ranks.send_job(job)
        except BaseException:
            ranks.close()
            raise
        return ranks


class LocalRanks:
    """Child processes; see `Ranks`.

    Args:
        folder: Their folder; removed by `close`.
        size: Number of ranks, rank 0 included.
    """

    has_weights = True
    why_lost = ""
    starts: Callable[..., "subprocess.Popen[Any]"] = staticmethod(subprocess.Popen)
    """Starts processes; tests replace it."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []

    @property
    def channels(self) -> Sequence[Connection]:
        """Pipes, in the order of their ranks."""
        return self._channels

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Their process ids, in the order of their ranks."""
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Start them."""
        for rank in range(1, self._size):
            here, there = Pipe()
            self._channels.append(here)
            with there:
                arguments = [str(there.fileno()), str(self._folder), str(rank), str(self._size)]
                # The model's classes may come from folders that only this process was told of.
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                command = [sys.executable, "-c", COMMAND, *arguments]
                process = self.starts(command, pass_fds=[there.fileno()], env=environment)
            self._processes.append(process)

    def send_job(self, job: RankJob) -> None:
        """Send the model and the spec.

        Raises:
            ServiceError: `FIT_INVALID`, the model cannot be sent to another process.
            RankLostError: One of them ended.
        """
        threads = max(1, job.threads // self._size)
        try:
            data = pickled((job, threads))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ServiceError(
                ErrorReason.FIT_INVALID,
                f"workers: the model cannot be sent to another process ({first_line(error)}); use one worker",
            ) from error
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send_bytes(data)
            except OSError as error:
                raise RankLostError(f"rank {rank} ended") from error

    def join(self) -> RankGroup:
        """Form the process group; see `Ranks`."""
        return RankGroup(file_store(self._folder, self._size), LOOPBACK, 0, self._size)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()  # they have nothing to save
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def pickled(value: Any) -> memoryview:
    """Return a value for a child process of this one."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


def unpickled(channel: Connection) -> Any:
    """Return the value that the parent has sent through a pipe of these two processes.

    Raises:
        EOFError, OSError: The parent has ended.
    """
    return torch.load(io.BytesIO(channel.recv_bytes()), weights_only=False)


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


COMMAND = "from trocar_server.training.fit.ranks.local_worker import main; main()"
"""Python's `-c`: with `-m`, the classes of the pickle would be those of `__main__`."""
