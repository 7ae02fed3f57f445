"""Reductions of values with samples, channels and padding in any dimension: each sample as it is alone."""

from typing import Any

import pytest
import torch

from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import (
    Axis,
    Crop,
    Gram,
    Grid,
    Index,
    Pca,
    Pool,
    PoolKind,
    Projection,
    Reduced,
    Slice,
    Take,
    TopK,
    reduce_value,
)
from trocar_server.tensors.reductions.padding import Own

LENGTHS = (3, 5, 1)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
NAMES = "bhtw"  # batch, heads, tokens, width
SIZES = {"b": 3, "h": 2, "t": 5, "w": 4}
OPERANDS = [torch.linspace(-1, 1, 8).reshape(2, 4), torch.ones(4)]
PCA = Pca(2, 4, has_mean=True)
ORDERS = ["btw", "tbw", "bwt", "wbt", "twb", "bhtw", "bthw", "tbhw", "hbtw", "bwht"]


def made(order: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    present = [name for name in NAMES if name in order]
    plain = torch.randn([SIZES[name] for name in present], generator=generator)
    return plain.permute([present.index(name) for name in order])


def reduced(order: str, *reductions: Any, filling: float = 0.0) -> Reduced:
    """The reductions of a padded batch, whose padding has this value."""
    value = made(order).clone()
    kept = MASK.reshape([SIZES[name] if name in "bt" else 1 for name in NAMES if name in order])
    present = [name for name in NAMES if name in order]
    value = value.masked_fill(~kept.permute([present.index(name) for name in order]), filling)
    operands = OPERANDS if PCA in reductions else []
    own = Own((order.index("b"), order.index("t")), MASK)
    return reduce_value(value, reductions, order.index("w"), operands, own=own, samples_dim=order.index("b"))


def alone(order: str, sample: int, *reductions: Any) -> torch.Tensor:
    """The reductions of one sample without padding, samples first."""
    value = made(order).movedim(order.index("b"), 0)[sample]
    rest = order.replace("b", "")
    value = value.narrow(rest.index("t"), 0, LENGTHS[sample])[None]
    operands = OPERANDS if PCA in reductions else []
    return reduce_value(value, reductions, 1 + rest.index("w"), operands).value


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "reduction",
    [
        Pool(PoolKind.AVG),
        Pool(PoolKind.MAX),
        Pool(PoolKind.GEM),
        Pool(PoolKind.AVG, (1,)),
        Pool(PoolKind.MAX, (2,)),
        Gram(is_normalized=True),
        Gram(is_normalized=False),
    ],
)
def test_each_sample_has_the_numbers_that_it_has_alone(order: str, reduction: Any) -> None:
    found = reduced(order, reduction, filling=7.0)
    assert found.samples_dim == 0
    for sample in range(3):
        expected = alone(order, sample, reduction)
        torch.testing.assert_close(found.value[sample : sample + 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) == 3])
@pytest.mark.parametrize("kind", [PoolKind.CLS, PoolKind.LAST])
def test_first_and_last_tokens_are_a_samples_own(order: str, kind: PoolKind) -> None:
    found = reduced(order, Pool(kind), filling=7.0)
    expected = torch.cat([alone(order, sample, Pool(kind)) for sample in range(3)])
    torch.testing.assert_close(found.value, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_top_k_selects_no_padding(order: str) -> None:
    dim = order.index("t")
    found = reduced(order, TopK(3, dim), filling=100.0)
    indices = found.companions["indices"].movedim((order.index("b"), dim), (0, 1))
    values = found.value.movedim((order.index("b"), dim), (0, 1))
    plain = made(order).movedim((order.index("b"), dim), (0, 1))
    for sample, length in enumerate(LENGTHS):
        count = min(3, length)
        expected = plain[sample, :length].topk(count, 0)
        torch.testing.assert_close(values[sample, :count], expected.values)
        torch.testing.assert_close(indices[sample, :count], expected.indices)
        assert not values[sample, count:].any()
        assert (indices[sample, count:] == -1).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "first",
    [PCA, Take(Axis.CHANNELS, (2, 0, 3)), Take(Axis.SAMPLES, (0, 1, 2)), Index((Slice(), ...))],
)
def test_padding_stays_known_through_other_reductions(order: str, first: Any) -> None:
    found = reduced(order, first, Pool(PoolKind.AVG), filling=7.0).value
    expected = torch.cat([alone(order, sample, *_alone(first), Pool(PoolKind.AVG)) for sample in range(3)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _alone(first: Any) -> tuple[Any, ...]:
    return () if isinstance(first, Take) and first.axis is Axis.SAMPLES else (first,)


@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) == 3])
def test_tokens_are_taken_where_they_are(order: str) -> None:
    found = reduced(order, Take(Axis.TOKENS, (2, 0)), Pool(PoolKind.AVG), filling=7.0).value
    value = made(order).movedim([order.index(name) for name in "btw"], [0, 1, 2])
    for sample, length in enumerate(LENGTHS):
        own = [place for place in (2, 0) if place < length]
        torch.testing.assert_close(found[sample], value[sample, own].mean(0))


@pytest.mark.parametrize("order", ["tbw", "bwt", "wbt"])
def test_patches_and_projections_have_samples_first(order: str) -> None:
    plain = made(order)
    first = plain.movedim(order.index("b"), 0)
    own: dict[str, Any] = {"channel_dim": order.index("w"), "samples_dim": order.index("b")}
    projected = reduce_value(plain, [Projection(6)], **own).value
    torch.testing.assert_close(projected, reduce_value(first.contiguous(), [Projection(6)]).value)
    grid = reduce_value(plain, [Grid(2, 2, 1)], **own).value
    tokens = plain.permute([order.index(name) for name in "btw"])
    torch.testing.assert_close(grid, tokens[:, 1:].transpose(1, 2).reshape(3, 4, 2, 2))


def test_a_crop_of_a_map_knows_its_padding() -> None:
    found = reduced("bhtw", Crop(1, 0, 3, 4), Pool(PoolKind.AVG), filling=7.0).value
    plain = made("bhtw")
    for sample, length in enumerate(LENGTHS):
        own = plain[sample, :, 1 : min(length, 4)]
        expected = own.mean((0, 1)) if own.numel() else torch.full((4,), torch.nan)
        torch.testing.assert_close(found[sample], expected, equal_nan=True)


@pytest.mark.parametrize("reduction", [Pool(PoolKind.AVG), Gram(), Projection(2), Take(Axis.SAMPLES, (0,))])
def test_a_value_without_samples_is_refused(reduction: Any) -> None:
    with pytest.raises(ServiceError, match="no dimension holds samples"):
        reduce_value(torch.ones(3, 4, 5), [reduction], samples_dim=None)
