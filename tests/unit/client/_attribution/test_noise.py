"""Noise that depends on the seed and on positions alone."""

import numpy as np
import scipy.stats

from trocar._attribution.noise import NoisyBatches


def test_noise_does_not_depend_on_batches_or_groups() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    whole = np.stack(list(NoisyBatches(x, 5, 0.5, 3, 0, 1)))
    cut = NoisyBatches(x[1:], 5, 0.5, 3, 1, 2)
    for _ in range(2):  # a stream may begin again
        rows = np.concatenate([cut.rows(batch, index) for index, batch in enumerate(cut)])
        np.testing.assert_array_equal(rows, whole[:, 1:])
    assert {len(batch) for batch in cut} == {4}


def test_noise_is_normal_with_the_wanted_deviation() -> None:
    x = np.full((2, 64, 64), 10.0)
    noise = np.stack(list(NoisyBatches(x, 4, 2.5, 0, 0, 1))) - x
    assert scipy.stats.kstest(noise.ravel() / 2.5, "norm").pvalue > 0.01
    assert abs(np.corrcoef(noise.reshape(8, -1)) - np.eye(8)).max() < 0.1


def test_another_seed_gives_other_noise() -> None:
    x = np.zeros((1, 8))
    first, second = (next(iter(NoisyBatches(x, 1, 1.0, seed, 0, 1))) for seed in (0, 1))
    assert (first != second).all()
