"""Lists of inputs with their targets are the data set of their pairs."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from trocar._uploads.upload_opening import opened_upload
from trocar.errors import SourceError

RANDOM = np.random.default_rng(0)
PIXELS = [RANDOM.integers(0, 255, (6, 5, 3)).astype(np.uint8) for _ in range(3)]
IMAGES = [Image.fromarray(pixels) for pixels in PIXELS]
LABELS = [0, 2, 1]


def stored(source: object, targets: object = None) -> bytes:
    """Return the bytes of the shards of a data set."""
    with opened_upload(source, targets, "", None, 1 << 20) as plan:
        return b"".join(bytes(part) for shard in plan.shards() for part in shard.parts())


@pytest.mark.parametrize("inputs", [IMAGES, PIXELS], ids=["images", "arrays"])
@pytest.mark.parametrize("labels", [LABELS, tuple(LABELS), np.array(LABELS)], ids=["list", "tuple", "array"])
def test_lists_are_stored_as_their_pairs(inputs: list[Any], labels: Any) -> None:
    expected = stored(list(zip(inputs, LABELS, strict=True)))
    assert stored((inputs, labels)) == expected
    assert stored((tuple(inputs), labels)) == expected
    assert stored(inputs, labels) == expected


def test_several_targets_have_names() -> None:
    named = {"first": LABELS, "second": np.array(LABELS) * 2}
    pairs = [
        (image, {"first": label, "second": label * 2}) for image, label in zip(IMAGES, LABELS, strict=True)
    ]
    assert stored((IMAGES, named)) == stored(pairs)


def test_a_tuple_of_two_samples_is_one_of_samples() -> None:
    first, second = zip(IMAGES[:2], LABELS[:2], strict=True)
    assert stored((first, second)) == stored([first, second])


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([0, 1], "3 inputs and 2 targets"),
        ({"a": [0, 1, 2, 3]}, "3 inputs and 4 targets a"),
        ("abc", "the targets are str"),
        (5, "the targets are int"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets: Any, expected: str) -> None:
    with pytest.raises(SourceError, match=expected):
        stored((IMAGES, targets))
