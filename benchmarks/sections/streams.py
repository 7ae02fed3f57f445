"""Streams against the caller's own loop and against single calls."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import trocar
from benchmarks.measuring import Effort, images, in_turns, ratio, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import served
from trocar._base.tensors import Array
from trocar._bench.local_passes import Local, LocalJob

_ROUNDS = 5


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    models = ["resnet18=random:0", "resnet50=random:0"]
    with served(models) as server, Local() as local, trocar.connect(server.address, timeout_s=600) as client:
        rows = [
            against_local(client, local, "resnet18", 8, effort.of(12), effort),
            against_local(client, local, "resnet50", 32, 2, effort),
            against_calls(client, 1, effort.of(200), effort),
            running_cost(client, effort),
        ]
    return [Table("Streams", rows, note="Time against the other way.")]


def against_local(
    client: trocar.Client, local: Local, model: str, batch: int, count: int, effort: Effort
) -> Row:
    """Compare `count` batches in one stream with as many local passes: features of `avgpool`."""
    inputs = images(batch)
    job = LocalJob(model, ("avgpool",), inputs.shape, 0, count, client.server_info().device)
    ways: dict[str, Callable[[], list[float]]] = {
        "local": lambda: [sum(local.measure(job))],
        "stream": partial(timed, partial(drain, client, model, inputs, count, ["avgpool"])),
    }
    outcome = in_turns(ways, effort.of(_ROUNDS))
    value = statistics.median(outcome["stream"]) / statistics.median(outcome["local"])
    return row(f"{model}, batches of {batch} in a stream, `avgpool`, against a local loop", value)


def against_calls(client: trocar.Client, batch: int, count: int, effort: Effort) -> Row:
    """Compare a stream with one call for each batch: statistics of `layer1` only."""
    inputs = images(batch, side=64)
    tap = trocar.tap("layer1", stats=["mean", "std"], values=False)

    def calls() -> None:
        for _ in range(count):
            client.extract("resnet18", inputs, [tap])

    value = ratio(partial(drain, client, "resnet18", inputs, count, [tap]), calls, effort.of(_ROUNDS))
    return row(
        f"resnet18, 64 x 64, statistics of `layer1`, batches of {batch}: a stream, against a call each", value
    )


def running_cost(client: trocar.Client, effort: Effort) -> Row:
    """Compare a stream with running mean and covariance of 512 channels with one that has no statistics."""
    inputs, count = images(32, side=64), effort.of(32)
    tap = trocar.tap("layer4", stats=["mean", "covariance"], over="channel", values=False)
    plain = trocar.tap("layer4", stats=["count"], values=False)
    value = ratio(
        partial(drain, client, "resnet18", inputs, count, [tap], running_statistics=True),
        partial(drain, client, "resnet18", inputs, count, [plain]),
        effort.of(_ROUNDS),
    )
    return row("resnet18, 64 x 64, running mean and covariance of `layer4`, against a count", value)


def drain(
    client: trocar.Client, model: str, inputs: Array, count: int, taps: list[object], **options: bool
) -> None:
    """Run a stream to its end."""

    def batches() -> Iterator[Array]:
        for _ in range(count):
            yield inputs

    with client.extract_stream(model, batches(), taps, **options) as stream:  # type: ignore[arg-type]
        for result in stream:
            result.unwrap()
