"""Streams against the caller's own loop and against single calls: `python -m benchmarks.streams`.

Each row alternates the two ways in rounds and prints the ratio of the medians.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

import trocar
from benchmarks.local import Local
from benchmarks.report import Row, print_rows
from benchmarks.served import served
from trocar._tensors import Array

_ROUNDS = 5
_PIXELS = (3, 224, 224)


def against_local(client: trocar.Client, local: Local, model: str, batch: int, count: int) -> Row:
    """Compare `count` batches in one stream with as many local passes: features of `avgpool`."""
    images = np.random.default_rng(0).standard_normal((batch, *_PIXELS), np.float32)

    def stream() -> None:
        drain(client, model, images, count, ["avgpool"])

    local.measure(model, ["avgpool"], images.shape, 2)
    seconds(stream)
    own, ours = [], []
    for _ in range(_ROUNDS):
        own.append(sum(local.measure(model, ["avgpool"], images.shape, count)))
        ours.append(seconds(stream))
    ratio = statistics.median(ours) / statistics.median(own)
    return Row(f"{model}, batches of {batch} in a stream, against a local loop", ratio)


def against_calls(client: trocar.Client, batch: int, count: int) -> Row:
    """Compare a stream with one call for each batch: statistics of `layer1` only."""
    images = np.random.default_rng(0).standard_normal((batch, 3, 64, 64), np.float32)
    tap = trocar.tap("layer1", stats=["mean", "std"], values=False)

    def stream() -> None:
        drain(client, "resnet18", images, count, [tap])

    def calls() -> None:
        for _ in range(count):
            client.extract("resnet18", images, [tap])

    seconds(stream)
    seconds(calls)
    pairs = [(seconds(stream), seconds(calls)) for _ in range(_ROUNDS)]
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return Row(f"resnet18, 64 x 64, statistics of layer1, batches of {batch}, against single calls", ratio)


def running_cost(client: trocar.Client) -> Row:
    """Compare a stream with running mean and covariance of 512 channels with one that has no statistics."""
    images = np.random.default_rng(0).standard_normal((32, 3, 64, 64), np.float32)
    tap = trocar.tap("layer4", stats=["mean", "covariance"], over="channel", values=False)
    plain = trocar.tap("layer4", stats=["count"], values=False)

    def with_statistics() -> None:
        drain(client, "resnet18", images, 32, [tap], running_statistics=True)

    def without() -> None:
        drain(client, "resnet18", images, 32, [plain])

    seconds(with_statistics)
    seconds(without)
    pairs = [(seconds(with_statistics), seconds(without)) for _ in range(_ROUNDS)]
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return Row("resnet18, running mean and covariance of layer4, against a count", ratio)


def drain(
    client: trocar.Client, model: str, images: Array, count: int, taps: list[object], **options: bool
) -> None:
    """Run a stream to its end."""

    def batches() -> Iterator[Array]:
        for _ in range(count):
            yield images

    with client.extract_stream(model, batches(), taps, **options) as stream:  # type: ignore[arg-type]
        for result in stream:
            result.unwrap()


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call took."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Run every case and print the table."""
    models = ["resnet18=random:0", "resnet50=random:0"]
    with served(models) as address, Local() as local, trocar.connect(address) as client:
        rows = [
            against_local(client, local, "resnet18", 8, 12),
            against_local(client, local, "resnet50", 32, 2),
            against_calls(client, 1, 200),
            running_cost(client),
        ]
    print_rows("Streams: time against the other way", rows)


if __name__ == "__main__":
    main()
