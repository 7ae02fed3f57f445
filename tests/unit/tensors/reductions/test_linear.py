"""Gram matrices, projections and principal components, against NumPy in float64."""

import math

import numpy as np
import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import Gram, Pca, Projection, linear, reduce_value
from trocar_server.tensors.reductions.linear import block_rows, matrix_blocks


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def refusal(value: torch.Tensor, wanted: Gram | Projection | Pca, channel_dim: int | None = None) -> str:
    operands = [torch.zeros(wanted.component_count, wanted.channel_count)] if isinstance(wanted, Pca) else []
    with pytest.raises(ServiceError) as refused:
        reduce_value(value, [wanted], channel_dim, operands)
    assert refused.value.reason is ErrorReason.REDUCTION_REJECTED
    return refused.value.message


def gaussian(features: int, count: int, seed: int) -> torch.Tensor:
    """The matrix as the guide page tells users to rebuild it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(features, count, generator=generator) / math.sqrt(count)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gram_is_the_inner_products_of_channels(dtype: torch.dtype, is_normalized: bool) -> None:
    value = random(2, 5, 4, 3, dtype=dtype)
    found = reduce_value(value, [Gram(is_normalized)]).value
    features = value.double().numpy().reshape(2, 5, 12)
    expected = np.einsum("bip,bjp->bij", features, features) / (12 if is_normalized else 1)
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_gram_of_tokens_is_over_the_width() -> None:
    value = random(2, 7, 4)
    expected = np.einsum("bpi,bpj->bij", value.double().numpy(), value.double().numpy())
    np.testing.assert_allclose(reduce_value(value, [Gram()]).value, expected, rtol=1e-5, atol=1e-5)


def test_gram_of_halves_does_not_leave_their_range() -> None:
    value = torch.full((1, 1, 2, 2), 1000.0, dtype=torch.float16)
    assert reduce_value(value, [Gram()]).value.item() == 4e6


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (1, 1), (4,), (2, 1000)])
def test_projection_is_a_product_with_the_documented_matrix(shape: tuple[int, ...], seed: int) -> None:
    value = random(*shape)
    found = reduce_value(value, [Projection(6, seed)]).value
    flat = value.reshape(shape[0], -1).double()
    expected = flat @ gaussian(flat.shape[1], 6, seed).double()
    assert (found.dtype, found.shape) == (torch.float32, (shape[0], 6))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [16, 48, 160, 4096])
@pytest.mark.parametrize(("features", "count"), [(1003, 7), (17, 1), (1, 3), (33, 1), (160, 5), (1601, 16)])
def test_blocks_of_the_matrix_are_together_one_draw(features: int, count: int, rows: int) -> None:
    blocks = list(matrix_blocks(Projection(count, 3), features, rows))
    firsts = [first for first, _ in blocks]
    assert torch.equal(torch.cat([block for _, block in blocks]), gaussian(features, count, 3))
    assert firsts == [sum(len(block) for _, block in blocks[:i]) for i in range(len(blocks))]
    assert max(len(block) for _, block in blocks) < rows + 16


@pytest.mark.parametrize("count", [1, 3, 128, 65_536])
def test_blocks_keep_memory_bounded(count: int) -> None:
    assert block_rows(count) % 16 == 0
    assert block_rows(count) * count <= linear.BLOCK_ELEMENTS


def test_a_projection_of_many_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value, wanted = random(2, 3, 10, 11), Projection(5, 1)
    whole = reduce_value(value, [wanted]).value
    monkeypatch.setattr(linear, "block_rows", lambda count: 16)
    torch.testing.assert_close(reduce_value(value, [wanted]).value, whole, rtol=1e-5, atol=1e-5)


def test_projection_keeps_squared_distances_on_average() -> None:
    value = random(2, 500)
    distance = (value[0] - value[1]).square().sum().item()
    projected = [reduce_value(value, [Projection(64, seed)]).value for seed in range(50)]
    found = [(p[0] - p[1]).square().sum().item() for p in projected]
    # The mean of 50 ratios, each chi-squared with 64 degrees of freedom, has the deviation 0.025.
    assert np.mean(found) / distance == pytest.approx(1, abs=0.1)


def test_a_projection_can_be_stopped_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "block_rows", lambda count: 16)
    calls: list[int] = []

    def check() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        reduce_value(random(1, 1000), [Projection(2)], check=check)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4), (2, 7, 5), (2, 5, 2, 2, 2)])
def test_pca_scores_are_those_of_a_decomposition_in_numpy(shape: tuple[int, ...], count: int) -> None:
    value = random(*shape, dtype=torch.float64) + 1e3
    channel_dim = 2 if len(shape) == 3 else 1
    rows = np.moveaxis(value.numpy(), channel_dim, -1).reshape(-1, 5)
    left, singular, right = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    operands = [torch.from_numpy(right[:count].copy()), torch.from_numpy(rows.mean(0))]
    found = reduce_value(value, [Pca(count, 5, torch.float64, has_mean=True)], operands=operands)
    positions = shape[1:channel_dim] + shape[channel_dim + 1 :]
    assert found.value.shape == (shape[0], *positions, count)
    assert found.channel_dim == len(shape) - 1
    np.testing.assert_allclose(
        found.value.numpy().reshape(-1, count), (left * singular)[:, :count], atol=1e-9
    )


def test_pca_centres_before_it_multiplies() -> None:
    value = random(4, 3) + 1e6
    mean = value.double().mean(0).float()
    components = random(2, 3, seed=1)
    found = reduce_value(value, [Pca(2, 3, has_mean=True)], operands=[components, mean]).value
    expected = (value.double() - mean.double()) @ components.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "constant_dtype", "expected"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_pca_is_computed_in_the_wider_dtype(
    dtype: torch.dtype, constant_dtype: torch.dtype, expected: torch.dtype
) -> None:
    components = random(2, 3, dtype=constant_dtype)
    assert reduce_value(
        random(4, 3, dtype=dtype), [Pca(2, 3, constant_dtype)], None, [components]
    ).value.dtype is (expected)


def test_nan_stays_in_its_sample() -> None:
    value = random(3, 4, 2, 2)
    value[1] = float("nan")
    for wanted in (Gram(), Projection(3), Pca(2, 4)):
        operands = [random(2, 4)] if isinstance(wanted, Pca) else []
        found = reduce_value(value, [wanted], operands=operands).value
        assert found.flatten(1).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("wanted", [Gram(), Projection(2), Pca(1, 3)])
def test_products_of_other_than_floats_are_refused(
    wanted: Gram | Projection | Pca, dtype: torch.dtype
) -> None:
    assert "float32" in refusal(torch.zeros(2, 3, 4, 4, dtype=dtype), wanted)


@pytest.mark.parametrize(
    ("value", "wanted", "channel_dim"),
    [
        (random(2, 3), Pca(1, 4), None),
        (random(3), Pca(1, 3), None),
        (random(2, 3), Gram(), 0),
        (random(), Projection(1), None),
        (torch.empty(1, 2**20).expand(2, 2**20), Projection(1024), None),
        (torch.empty(1, 1).expand(1, 2**25), Gram(), None),
    ],
)
def test_a_product_that_does_not_fit_is_refused(
    value: torch.Tensor, wanted: Gram | Projection | Pca, channel_dim: int | None
) -> None:
    assert str(tuple(value.shape)) in refusal(value, wanted, channel_dim)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 2)])
def test_products_of_nothing_are_zero_or_empty(shape: tuple[int, ...]) -> None:
    value = torch.empty(shape)
    assert torch.equal(reduce_value(value, [Gram()]).value, torch.zeros(shape[0], 3, 3))
    assert torch.equal(reduce_value(value, [Projection(4)]).value, torch.zeros(shape[0], 4))
    scores = reduce_value(value, [Pca(2, 3)], operands=[random(2, 3)]).value
    assert scores.shape == (shape[0], *shape[2:], 2)
