"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, the last fifth kept for testing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[Any]
_TEST_SHARE = 5
_WHITE = 16


@dataclass(frozen=True)
class Digits:
    """Images (samples, 8, 8, 3) uint8 and labels 0 to 9."""

    images: Pixels
    labels: NDArray[np.int64]

    def enlarged(self, factor: int) -> NDArray[np.float32]:
        """Return them as float32 (samples, 3, 8 * factor, 8 * factor), about -1 to 1, each pixel a square."""
        squares = self.images.repeat(factor, axis=1).repeat(factor, axis=2).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(squares / np.float32(127.5) - 1, dtype=np.float32)


def load_digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and those to test on, in a fixed random order."""
    from sklearn.datasets import load_digits as load  # an extra, and slow to import

    values, labels = map(np.asarray, load(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    grey = np.round(values[order] * (255 / _WHITE)).astype(np.uint8).reshape(-1, 8, 8, 1)
    images, labels = grey.repeat(3, axis=3), labels[order].astype(np.int64)
    first_test = len(labels) - len(labels) // _TEST_SHARE
    return (
        Digits(images[:first_test], labels[:first_test]),
        Digits(images[first_test:], labels[first_test:]),
    )
