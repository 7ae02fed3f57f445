"""Directions: probes of all blocks against extracting what they are fitted to, and what a readout costs."""

from functools import partial
from typing import Literal

import numpy as np

import trocar
from benchmarks.measuring import Effort, images, ratio
from benchmarks.report import Row, Table, row
from benchmarks.served import served
from trocar._base.tensors import Array

_IMAGES, _BATCH, _ROUNDS, _REPEATS = 2000, 32, 2, 10
_Kind = Literal["logistic", "mean_difference"]
_BLOCKS = "encoder.layers.encoder_layer_*"
_CONFIG = """
[models.vit]
factory = "benchmarks.models:small_vit"
input_shape = [3, 224, 224]
weights = "random:0"
"""


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    with served([], config=_CONFIG) as server, trocar.connect(server.address, timeout_s=3600) as client:
        return [Table("Directions", [*_probes(client, effort), _readout(client, effort)])]


def _probes(client: trocar.Client, effort: Effort) -> list[Row]:
    """Compare a fit at all blocks with a stream of the pooled values, of as many images."""
    count = effort.of(_IMAGES)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, count)
    pixels = images(_BATCH)
    batches: list[Array] = []
    for first in range(0, count, _BATCH):
        own = labels[first : first + _BATCH]
        batches.append(pixels[: len(own)] * (1 + own[:, None, None, None]).astype(np.float32))
    pooled = trocar.tap(_BLOCKS, reduce=trocar.pool("avg"))

    def probe(kind: _Kind) -> None:
        client.fit_direction("vit", iter(batches), labels, [_BLOCKS], name="bench", kind=kind, replace=True)

    def extract() -> None:
        for _ in client.extract_stream("vit", iter(batches), [pooled]):
            pass

    kinds: tuple[_Kind, ...] = ("logistic", "mean_difference")
    return [
        row(
            f"probes ({kind.replace('_', ' ')}, 5 folds) of 12 blocks of a ViT on {count:,} images, against "
            "extracting the pooled values",
            ratio(partial(probe, kind), extract, effort.of(_ROUNDS)),
            1.15,
        )
        for kind in kinds
    ]


def _readout(client: trocar.Client, effort: Effort) -> Row:
    """Compare a pass with a readout of one block with one that returns the smallest tap."""
    pixels = images(8)
    at = _BLOCKS.replace("*", "5")
    direction = trocar.Direction.of(np.random.default_rng(0).standard_normal(192))
    client.store_direction("vit", "read", at, direction, replace=True)
    readout = trocar.readout("read", at, pooled=True)
    own = partial(client.extract, "vit", pixels, [readout, "heads"])
    plain = partial(client.extract, "vit", pixels, ["heads"])
    value = ratio(own, plain, effort.of(_ROUNDS) * 5, _REPEATS)
    return row("a readout of a block beside the classes, 8 images, against the classes alone", value, 1.02)
