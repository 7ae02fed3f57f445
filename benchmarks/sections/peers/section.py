"""Peer tables: each peer in turn with local passes, one after the other."""

import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import Effort
from benchmarks.numerics import options_of
from benchmarks.report import Figure, Row, Table
from benchmarks.sections.peers.environments import PeerMissingError, peer_environment, python_of
from benchmarks.sections.peers.targets import KServeCall, LitServeCall, PeerCall, PlainCall
from benchmarks.served import running, served, wait_for
from trocar._bench.load import Load
from trocar._bench.local_passes import Local, LocalJob
from trocar._bench.process import HelperError
from trocar._bench.records import Record, calls_per_second
from trocar._bench.served import Served
from trocar._bench.worker import Target

_MODELS = ("resnet18", "resnet50")
_ROUNDS, _ROUND_S = 6, 4.0
_SIDE = 224


@dataclass(frozen=True)
class Case:
    """One row for each model."""

    name: str
    batch: int
    clients: int
    is_speed: bool = False
    """Whether images per second are compared, and not the median time of a call."""


CASES = (
    Case("batch 1, one client, p50", 1, 1),
    Case("32 clients of batch 1, images/s", 1, 32, is_speed=True),
    Case("batch 32, one client, p50", 32, 1),
)


@dataclass(frozen=True)
class Hosted:
    """A running peer, and its call."""

    target: Callable[[str, int], Target]
    """Of a model and a batch."""
    python: str = ""
    """The interpreter of its clients; this one when empty."""


@contextmanager
def ours() -> Iterator[Hosted]:
    """Run Trocar."""
    with served([f"{name}=random:0" for name in _MODELS]) as server:

        def target(model: str, batch: int) -> Target:
            options = tuple(options_of("exact").items())
            return Served(server.options, model, ("layer4",), batch, (3, _SIDE, _SIDE), call_options=options)

        yield Hosted(target)


@contextmanager
def peer(module: str, call: type[PeerCall], environment: str = "") -> Iterator[Hosted]:
    """Run a peer's server.

    Raises:
        PeerMissingError: It is missing and cannot be installed, or it does not start.
    """
    python = python_of(environment) if environment else sys.executable
    port = _free_port()
    command = [python, "-m", f"benchmarks.sections.peers.{module}", str(port), *_MODELS]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(command, log, peer_environment()) as process:
            try:
                wait_for(process, lambda: _answers(port))
            except RuntimeError:
                raise PeerMissingError(f"its server did not start: {_last_line(log)}") from None

            def target(model: str, batch: int) -> Target:
                made: Any = call(port, model, batch)  # each kind of call has its own `open`
                return made  # type: ignore[no-any-return]

            yield Hosted(target, python if environment else "")


PEERS: Mapping[str, Callable[[], AbstractContextManager[Hosted]]] = {
    "Trocar, exact": ours,
    "plain gRPC handler": partial(peer, "plain_grpc", PlainCall),
    "KServe": partial(peer, "kserve_server", KServeCall, "kserve"),
    "LitServe": partial(peer, "litserve_server", LitServeCall, "litserve"),
}


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    names = [f"{model}, {case.name}" for model in _MODELS for case in CASES]
    columns: dict[str, dict[str, Figure]] = {}
    with Local() as local:
        for name, start in PEERS.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            columns[name] = _column(start, local, names, effort)
    rows = [Row(name, {title: column[name] for title, column in columns.items()}) for name in names]
    note = "Time of a call against local eager passes; of rows of images per second, speed against theirs."
    return [Table("Peers", rows, tuple(PEERS), note)]


def _column(
    start: Callable[[], AbstractContextManager[Hosted]], local: Local, names: list[str], effort: Effort
) -> dict[str, Figure]:
    """Measure all rows of one peer; a row that cannot be measured has the reason."""
    result: dict[str, Figure] = {}
    try:
        with start() as hosted:
            for model in _MODELS:
                for case in CASES:
                    result[f"{model}, {case.name}"] = _figure(hosted, local, model, case, effort)
    except (PeerMissingError, HelperError) as error:
        reason = " ".join(str(error).split())
        return {name: result.get(name, Figure(None, reason=reason)) for name in names}
    return result


def _figure(hosted: Hosted, local: Local, model: str, case: Case, effort: Effort) -> Figure:
    """Measure one case in turn with local passes."""
    job = LocalJob(model, ("layer4",), (case.batch, 3, _SIDE, _SIDE), _ROUND_S * effort.of(5) / 5)
    environment = peer_environment() if hosted.python else None
    own: list[float] = []
    rounds: list[list[Record]] = []
    with Load(hosted.target(model, case.batch), case.clients, 0, hosted.python, environment) as load:
        load.closed(job.duration_s)
        for _ in range(effort.of(_ROUNDS)):
            own += local.measure(job)
            rounds.append(load.closed(job.duration_s))
    base = statistics.median(own)
    if case.is_speed:
        speed = statistics.median(map(calls_per_second, rounds)) * case.batch
        return Figure(speed * base / case.batch, higher_is_better=True)
    times = [record.ended_s - record.due_s for records in rounds for record in records]
    return Figure(statistics.median(times) / base)


def _answers(port: int) -> bool:
    """Whether a server listens on this address."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "nothing was printed"
