import numpy as np
import pytest

from trocar._analysis import feature_rows
from trocar._analysis.feature_rows import FeatureRows


def test_blocks_give_every_feature_of_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_rows, "_BLOCK_BYTES", 8 * 5 * 4)  # 4 features of 5 samples
    values = np.random.default_rng(0).standard_normal((5, 3, 7)).astype(np.float32)
    with FeatureRows("x") as rows:
        rows.append(values[:2])
        rows.append(values[2:])
        blocks = list(rows.blocks())
    assert [block.shape for block in blocks] == [(5, 4)] * 5 + [(5, 1)]
    assert {block.dtype for block in blocks} == {np.dtype(np.float64)}
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), values.reshape(5, 21))


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint8, np.int64, np.bool_])
def test_every_real_dtype_is_read_back(dtype: type[np.generic]) -> None:
    values = np.array([[0, 1], [1, 0], [1, 1]], dtype)
    with FeatureRows("x") as rows:
        rows.append(values)
        (block,) = rows.blocks()
    np.testing.assert_array_equal(block, values.astype(np.float64))


def test_transposed_values_keep_their_order() -> None:
    values = np.arange(12.0).reshape(3, 4).T
    with FeatureRows("x") as rows:
        rows.append(values)
        (block,) = rows.blocks()
    np.testing.assert_array_equal(block, values)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_gives_no_block(shape: tuple[int, int]) -> None:
    with FeatureRows("x") as rows:
        rows.append(np.zeros(shape))
        assert list(rows.blocks()) == []


def test_a_single_number_is_refused() -> None:
    with FeatureRows("x") as rows, pytest.raises(ValueError, match="'x' is a single number"):
        rows.append(np.float64(1.0) * np.ones(()))


def test_complex_numbers_are_refused() -> None:
    with FeatureRows("x") as rows, pytest.raises(ValueError, match="complex"):
        rows.append(np.ones((2, 2), np.complex64))
