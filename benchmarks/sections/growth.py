"""Growth: time must not grow with hosted and stored models, nor memory with work done."""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np

import trocar
from benchmarks.measuring import Effort, images, in_turns, ratio, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import Server, served
from trocar._base.tensors import Array

_ROUNDS, _REPEATS = 10, 10
_FLAT = 1.05
_MODELS = (1, 10, 50)
_TRAINERS = (1, 10, 50)
_LIMITS = "[limits]\nmax_trainers = 100\n"


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    rows = [*by_hosted_models(effort), *by_stored_trainers(effort)]
    with served(["resnet50=random:0"]) as server, trocar.connect(server.address, timeout_s=600) as client:
        rows += [*tap_cost(client, effort), hooks(client, effort)]
    return [Table("Growth", rows), Table("Memory over time", memory_rows(effort))]


def by_hosted_models(effort: Effort) -> list[Row]:
    """Compare servers that host few and many models; calls go to one model."""
    counts = _MODELS[:2] if effort.is_quick else _MODELS
    with ExitStack() as stack:
        ways = {}
        for count in counts:
            server = stack.enter_context(served([], config=_hosting(count)))
            client = stack.enter_context(trocar.connect(server.address))
            call = partial(client.extract, "m0", images(1), ["layer4"])
            ways[str(count)] = partial(timed, call, effort.of(_REPEATS))
        outcome = in_turns(ways, effort.of(_ROUNDS))
    base = statistics.median(outcome[str(counts[0])])
    return [
        row(
            f"resnet18, batch 1: {count} hosted models against {counts[0]}",
            statistics.median(outcome[str(count)]) / base,
            _FLAT,
        )
        for count in counts[1:]
    ]


def _hosting(count: int) -> str:
    entries = (
        f'[models.m{index}]\narchitecture = "resnet18"\nweights = "random:{index}"\n'
        for index in range(count)
    )
    return "\n".join(entries)


def by_stored_trainers(effort: Effort) -> list[Row]:
    """Compare calls with few and many trainers in the store: a pass, and a step of one of them."""
    counts = _TRAINERS[:2] if effort.is_quick else _TRAINERS
    inputs, labels = images(8, side=64), np.arange(8) % 10
    outcome: dict[int, list[float]] = {}
    with (
        served(["resnet18=random:0"], config=_LIMITS) as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        trainers: list[trocar.training.Trainer] = []
        for count in counts:
            while len(trainers) < count:
                trainers.append(
                    client.train("resnet18", head=10, trainable="fc", optimizer=trocar.training.sgd(lr=0.01))
                )
            call = partial(client.extract, "resnet18", inputs, ["layer4"])
            step = partial(trainers[0].step, inputs, labels)
            ways = {
                "pass": partial(timed, call, effort.of(_REPEATS)),
                "step": partial(timed, step, effort.of(_REPEATS)),
            }
            seconds = in_turns(ways, effort.of(_ROUNDS))
            outcome[count] = [statistics.median(seconds[name]) for name in ways]
        for trainer in trainers:
            trainer.close()
    return [
        row(f"resnet18, batch 8: {name}, {count} trainers against {counts[0]}", now / first, _FLAT)
        for count in counts[1:]
        for name, now, first in zip(("a pass", "a step"), outcome[count], outcome[counts[0]], strict=True)
    ]


def tap_cost(client: trocar.Client, effort: Effort) -> list[Row]:
    """Compare the cost of a MB of feature maps in small and in large replies."""
    batch = images(8)
    plain = trocar.tap("fc", stats=["count"], values=False)
    taps = {"layer1 (26 MB)": ["layer1"], "layer1 to layer3 (45 MB)": ["layer1", "layer2", "layer3"]}
    taps["every convolution (355 MB)"] = ["**:Conv2d"]
    per_byte, names = {}, list(taps)
    for name, wanted in taps.items():
        maps = client.extract("resnet50", batch, [*wanted, plain])
        size = sum(array.nbytes for array in maps.values())
        ways = {
            "with": partial(timed, partial(client.extract, "resnet50", batch, [*wanted, plain])),
            "without": partial(timed, partial(client.extract, "resnet50", batch, [plain])),
        }
        outcome = in_turns(ways, effort.of(_ROUNDS))
        extra = statistics.median(outcome["with"]) - statistics.median(outcome["without"])
        per_byte[name] = extra * 1e9 / size
    return [
        row(
            f"resnet50, batch 8: time for a byte of `{name}` against `{names[0]}`",
            per_byte[name] / per_byte[names[0]],
            note=f"{per_byte[name]:.2f} against {per_byte[names[0]]:.2f} ms/MB",
        )
        for name in names[1:]
    ]


def hooks(client: trocar.Client, effort: Effort) -> Row:
    """Compare a pass with a hook on every module with a pass with one hook; only counts are returned."""
    batch = images(8)
    everywhere = trocar.tap("**", stats=["count"], values=False)
    one = trocar.tap("fc", stats=["count"], values=False)
    count = len(client.extract("resnet50", batch, [everywhere]).info)
    outcome = ratio(
        partial(client.extract, "resnet50", batch, [everywhere]),
        partial(client.extract, "resnet50", batch, [one]),
        effort.of(_ROUNDS),
    )
    return row(
        f"resnet50, batch 8: {count} values tapped, against one", outcome, _FLAT, "counts only come back"
    )


def memory_rows(effort: Effort) -> list[Row]:
    """Measure the growth of a server's memory with the work done."""
    with served(["resnet18=random:0"]) as server, trocar.connect(server.address, timeout_s=600) as client:
        requests = after_requests(server, client, 200 if effort.is_quick else 10_000)
        streams = after_stream(server, client, 10 if effort.is_quick else 40)
    return [requests, *streams]


def after_requests(server: Server, client: trocar.Client, count: int) -> Row:
    """Measure the memory that remains after so many calls."""
    batch = images(1, side=64)
    for _ in range(count // 10):
        client.extract("resnet18", batch, ["layer4"])
    before = server.memory_bytes()
    for _ in range(count):
        client.extract("resnet18", batch, ["layer4"])
    grown = (server.memory_bytes() - before) / 1e6
    return row(f"the server's memory after {count:,} more calls, resnet18, 64 x 64", grown, 20, unit="MB")


def after_stream(server: Server, client: trocar.Client, count: int) -> list[Row]:
    """Measure peak memory during a stream, and during one of ten times the length."""
    batch = images(8)
    _drain(client, batch, count)
    short = server.memory_bytes("VmHWM")
    _drain(client, batch, count * 10)
    grown = (server.memory_bytes("VmHWM") - short) / 1e6
    return [
        row(
            f"the server's most memory, a stream of {count * 10} batches against one of {count}",
            grown,
            20,
            unit="MB",
        )
    ]


def _drain(client: trocar.Client, batch: Array, count: int) -> None:
    def batches() -> Iterator[Array]:
        for _ in range(count):
            yield batch

    with client.extract_stream("resnet18", batches(), ["layer4"]) as stream:
        for result in stream:
            result.unwrap()
