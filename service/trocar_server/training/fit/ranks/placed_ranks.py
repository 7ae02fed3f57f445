"""Placed ranks: processes on the nodes of a cluster, which connect to rank 0 over its network.

A rank builds its model from the same configuration as the replica that is rank 0, and then receives every
weight from there. Only messages of `rank_messages` cross the network.
"""

import secrets
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.checks.spec_checks import parse_spec
from trocar_server.training.fit.ranks.rank_group import (
    NETWORK_TRANSFER_S,
    RankGroup,
    first_store,
    other_store,
)
from trocar_server.training.fit.ranks.rank_launch import RankJob, RankLostError
from trocar_server.training.fit.ranks.rank_messages import receive, send
from trocar_server.training.fit.ranks.rank_sockets import accept, address_of, connect, listen
from trocar_server.training.fit.ranks.rank_worker import RankModel, build, serve

_CHECK_EVERY_S = 0.1
"""How often a wait for ranks looks at the guard and at the placer."""


class Placer(Protocol):
    """Places processes on the nodes of a cluster, and tells what becomes of them."""

    @property
    def capacity(self) -> int | None:
        """How many ranks all nodes have resources for, used ones included; None while that is not known."""
        ...

    def place(self, own_id: str, count: int, address: str, secret: str) -> None:
        """Begin to start ranks.

        Args:
            own_id: Names them later.
            count: How many: ranks 1 to `count`.
            address: Where rank 0 listens for them.
            secret: What they and rank 0 prove to each other.
        """
        ...

    def no_room(self, own_id: str) -> str:
        """Say why there was no room for them in time; empty if there was, or is still awaited."""
        ...

    def why_lost(self, own_id: str) -> str:
        """Say why one of them is lost; empty if none is."""
        ...

    def release(self, own_id: str) -> None:
        """End them."""
        ...


class PlacedLauncher:
    """Starts ranks on the nodes of a cluster; see `RankLauncher`.

    Args:
        placer: Places them.
        host: Address of this node, by which the others reach it.
    """

    def __init__(self, placer: Placer, host: str) -> None:
        self._placer, self._host = placer, host

    def room_problem(self, size: int) -> str:
        """Say why there can never be so many; see `RankLauncher`."""
        capacity = self._placer.capacity
        if capacity is None or size <= capacity:
            return ""
        return (
            f"the nodes of the cluster have room for {capacity}, the trainer's replica included, each with "
            f"the resources of a replica, and not for {size}; use fewer workers, or add nodes"
        )

    def launch(self, job: RankJob, size: int, guard: PassGuard) -> "PlacedRanks":
        """Start the ranks from 1; see `RankLauncher`."""
        ranks = PlacedRanks(self._placer, self._host, size)
        try:
            ranks.start(guard)
            ranks.send_job(job)
        except BaseException:
            ranks.close()
            raise
        return ranks


class PlacedRanks:
    """Processes on the nodes of a cluster; see `Ranks`.

    Args:
        placer: Places them.
        host: Address of this node.
        size: Number of ranks, rank 0 included.
    """

    has_weights = False
    process_ids = ()

    def __init__(self, placer: Placer, host: str, size: int) -> None:
        self._placer, self._host, self._size = placer, host, size
        self._own_id = uuid.uuid4().hex
        self._channels: dict[int, Connection] = {}
        self._is_closed = False

    @property
    def channels(self) -> Sequence[Connection]:
        """Sockets, in the order of their ranks."""
        return [self._channels[rank] for rank in range(1, self._size)]

    @property
    def why_lost(self) -> str:
        """Why one of them is lost; empty if none is."""
        return self._placer.why_lost(self._own_id)

    def start(self, guard: PassGuard) -> None:
        """Place them and wait until all are connected.

        Raises:
            ServiceError: `SERVER_BUSY`, there is no room.
            RankLostError: One of them ended.
            PassAborted: The guard stopped the wait.
        """
        secret = secrets.token_hex(32)
        with listen(self._host) as listener:
            self._placer.place(self._own_id, self._size - 1, address_of(listener), secret)
            while len(self._channels) < self._size - 1:
                self._check(guard)
                self._take(listener, secret)

    def send_job(self, job: RankJob) -> None:
        """Send what they build, by its name: they have the configuration.

        Raises:
            RankLostError: One of them ended.
        """
        message = {
            "base": job.base.spec.model_id,
            "spec": job.spec.model_dump(mode="json"),
            "teachers": sorted(job.teachers),
            "threads": job.threads,
            "size": self._size,
        }
        self._tell_all(message)

    def join(self) -> RankGroup:
        """Form the process group; see `Ranks`."""
        store, address = first_store(self._host)
        self._tell_all({"store": address})
        return RankGroup(store, self._host, 0, self._size, NETWORK_TRANSFER_S)

    def close(self) -> None:
        """End them."""
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        self._placer.release(self._own_id)

    def _take(self, listener: socket.socket, secret: str) -> None:
        accepted = accept(listener, secret, _CHECK_EVERY_S)
        if accepted is None:
            return
        rank, channel = accepted
        if rank in range(1, self._size) and rank not in self._channels:
            self._channels[rank] = channel
        else:
            channel.close()

    def _check(self, guard: PassGuard) -> None:
        guard.check()
        if problem := self._placer.no_room(self._own_id):
            raise ServiceError(ErrorReason.SERVER_BUSY, f"workers: {problem}")
        if why := self.why_lost:
            raise RankLostError(why)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for rank, channel in enumerate(self.channels, 1):
            try:
                send(channel, message)
            except OSError as error:
                raise RankLostError(self.why_lost or f"rank {rank} ended") from error


def serve_rank(
    address: str,
    secret: str,
    rank: int,
    host: str,
    scratch_dir: Path,
    load: Callable[[str], HostedModel],
) -> None:
    """Be a rank until rank 0 closes the channel.

    Args:
        address: Where rank 0 listens.
        secret: What both prove to each other.
        rank: Its number, from 1.
        host: Address of this node, by which the others reach it.
        scratch_dir: Parent of the spool's folder.
        load: Loads a model by its id.

    Raises:
        OSError: Rank 0 is not there.
    """
    with connect(address, secret, rank) as channel, suppress(EOFError, OSError, RuntimeError):
        size = 0

        def built() -> RankModel:
            nonlocal size
            job = receive(channel)
            size = job["size"]
            teachers = {model_id: load(model_id) for model_id in job["teachers"]}
            made = RankJob(load(job["base"]), parse_spec(job["spec"]), teachers, job["threads"])
            return build(made, scratch_dir, made.threads, has_weights=False)

        def join() -> RankGroup:
            store = other_store(receive(channel)["store"])
            return RankGroup(store, host, rank, size, NETWORK_TRANSFER_S)

        serve(channel, built, join)
