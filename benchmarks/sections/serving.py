"""Serving against local passes, in every numerics option.

The client, the server and the local passes are separate processes, and take turns.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trocar
from benchmarks.measuring import Effort, images, in_turns, local_way, timed
from benchmarks.numerics import NUMERICS, options_of, why_not
from benchmarks.report import Figure, Row, Table
from benchmarks.served import Server, served
from trocar._bench.load import Load
from trocar._bench.local_passes import Local, LocalJob
from trocar._bench.records import Record, calls_per_second, quantiles
from trocar._bench.served import Served

_ROUNDS = 10
_CLIENTS = 32
_SIDE = 224
_CONFIG = "".join(f'[models.{name}]\nmerge = "everybody"\n' for name in ("resnet18", "resnet50"))
"""Images per second of many clients need merged passes, which only the operator can allow."""


@dataclass(frozen=True)
class Case:
    """One row: model, request, and the targets for exact, fast and bf16."""

    name: str
    model: str
    tap: str
    batch: int
    repeats: int
    targets: Sequence[float]
    p99_targets: Sequence[float] = field(default=())


CASES = [
    Case("batch 1, p50", "resnet18", "layer4", 1, 20, (1.03, 0.60, 0.33), (1.5, 1.0, 0.5)),
    Case("batch 1, p50", "resnet50", "layer4", 1, 12, (1.03, 0.60, 0.33), (1.5, 1.0, 0.5)),
    Case("batch 32, `layer4`", "resnet18", "layer4", 32, 2, (0.70, 0.42, 0.23)),
    Case("batch 32, `layer4`", "resnet50", "layer4", 32, 1, (0.50, 0.42, 0.14)),
    Case("batch 32, `layer1` (26 MB back)", "resnet18", "layer1", 32, 3, (0.75, 0.38, 0.25)),
    Case("batch 32, `layer1` (103 MB back)", "resnet50", "layer1", 32, 2, (0.75, 0.38, 0.25)),
]
_LOAD_TARGETS = (1.0, 1.8, 3.3)


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    models = ["resnet18=random:0", "resnet50=random:0"]
    with served(models, config=_CONFIG) as server, Local() as local, trocar.connect(server.address) as client:
        device = client.server_info().device
        rows = [row for case in CASES for row in latency_rows(client, local, case, effort, device)]
        rows += [load_row(server, local, model, effort, device) for model in ("resnet18", "resnet50")]
    rows += _unix_rows(effort)
    note = (
        "Time against local eager passes; of the rows of images per second, speed against theirs. Models "
        'with `merge = "everybody"`, without which clients are not merged.'
    )
    return [Table("Serving", rows, NUMERICS, note)]


def _unix_rows(effort: Effort) -> list[Row]:
    """Return the rows of a client on the server's machine, which shares memory with it."""
    case = replace(CASES[0], name=f"{CASES[0].name}, Unix socket")
    with (
        tempfile.TemporaryDirectory() as folder,
        served([f"{case.model}=random:0"], "--host", f"unix:{folder}/trocar.sock") as server,
        Local() as local,
        trocar.connect(server.address) as client,
    ):
        return latency_rows(client, local, case, effort, client.server_info().device)[:1]


def latency_rows(
    client: trocar.Client, local: Local, case: Case, effort: Effort, device: str = "cpu"
) -> list[Row]:
    """Return the rows of one case: p50, and p99 where there are targets for it."""
    batch = images(case.batch, _SIDE)
    call = partial(client.extract, case.model, batch, [case.tap])
    reasons = {numerics: why_not(numerics, call) for numerics in NUMERICS}
    repeats = effort.of(case.repeats)
    job = LocalJob(case.model, (case.tap,), batch.shape, 0, repeats, device)
    ways: dict[str, Callable[[], Sequence[float]]] = {"local": local_way(local, job)}
    for numerics in NUMERICS:
        if not reasons[numerics]:
            ways[numerics] = partial(timed, partial(call, **options_of(numerics)), repeats)
    seconds = in_turns(ways, effort.of(_ROUNDS))
    base = statistics.median(seconds["local"])
    note = f"local p50 {base * 1e3:.1f} ms, p99 {quantiles(seconds['local'], [0.99])[0] / base:.2f} of it"
    rows = [_row(f"{case.model}, {case.name}", seconds, 0.5, base, case.targets, reasons, note)]
    if case.p99_targets:
        name = f"{case.model}, batch {case.batch}, p99 against local p50"
        rows.append(_row(name, seconds, 0.99, base, case.p99_targets, reasons))
    return rows


def _row(
    name: str,
    seconds: dict[str, list[float]],
    share: float,
    base: float,
    targets: Sequence[float],
    reasons: dict[str, str],
    note: str = "",
) -> Row:
    figures = {}
    for numerics, target in zip(NUMERICS, targets, strict=True):
        result = seconds.get(numerics)
        value = quantiles(result, [share])[0] / base if result else None
        figures[numerics] = Figure(value, target, reason=reasons[numerics])
    return Row(name, figures, note)


def load_row(server: Server, local: Local, model: str, effort: Effort, device: str = "cpu") -> Row:
    """Return the images per second of many clients with one image each, against local passes one by one."""
    job = LocalJob(model, ("layer4",), (1, 3, _SIDE, _SIDE), 5 * effort.of(5) / 5, device=device)
    figures = {}
    for numerics, target in zip(NUMERICS, _LOAD_TARGETS, strict=True):
        with trocar.connect(server.address) as client:
            reason = why_not(numerics, partial(client.extract, model, images(1), ["layer4"]))
        value = None if reason else _speed_ratio(server, local, job, options_of(numerics), effort)
        figures[numerics] = Figure(value, target, higher_is_better=True, reason=reason)
    return Row(f"{model}, images/s of {_CLIENTS} clients of batch 1", figures)


def _speed_ratio(
    server: Server, local: Local, job: LocalJob, options: dict[str, Any], effort: Effort
) -> float:
    target = Served(
        server.options, job.architecture, job.paths, 1, job.shape[1:], call_options=tuple(options.items())
    )
    own: list[float] = []
    rounds: list[list[Record]] = []
    with Load(target, _CLIENTS) as load:
        load.closed(job.duration_s)
        for _ in range(effort.of(5)):
            own += local.measure(job)
            rounds.append(load.closed(job.duration_s))
    return statistics.median(map(calls_per_second, rounds)) * statistics.median(own)
