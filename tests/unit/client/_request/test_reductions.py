"""Reductions in the caller's words: what goes out, and what is refused before anything does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trocar
from trocar._base.tensors import dequantize
from trocar._request.reductions import AXES, CASTS, POOL_KINDS
from trocar_api.v1 import reduction_pb2 as pb
from trocar_api.v1 import tensor_pb2

COMPONENTS = np.arange(6, dtype=np.float32).reshape(2, 3)
MEAN = np.ones(3, np.float32)


def positions(reduction: trocar.Reduction) -> list[int]:
    return list(reduction.to_wire().take.positions)


def test_the_tables_cover_the_contract() -> None:
    assert sorted(AXES.values()) == sorted(set(pb.Axis.values()) - {0})
    assert sorted(POOL_KINDS.values()) == sorted(set(pb.PoolKind.values()) - {0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [3]),
        (np.int64(-1), [-1]),
        ([2, 0, 2], [2, 0, 2]),
        (range(3), [0, 1, 2]),
        (np.array([5, 4]), [5, 4]),
        (slice(2, 5), [2, 3, 4]),
        (slice(4), [0, 1, 2, 3]),
        (slice(0, 6, 4), [0, 4]),
        (slice(-3, None), [-3, -2, -1]),
        (slice(-3, -1), [-3, -2]),
    ],
)
def test_positions_may_be_given_in_many_ways(given: Any, expected: list[int]) -> None:
    assert positions(trocar.channels(given)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: trocar.channels([]),
        lambda: trocar.channels(range(65_537)),
        lambda: trocar.channels(slice(0, 2**80)),
        lambda: trocar.channels(slice(3, None)),
        lambda: trocar.channels(slice(None, -3)),
        lambda: trocar.channels(slice(-3, 4)),
        lambda: trocar.channels(slice(None)),
        lambda: trocar.channels(slice(5, 0, -1)),
        lambda: trocar.channels([2**63]),
        lambda: trocar.index(np.s_[::-1]),
        lambda: trocar.index(np.s_[..., 0, ...]),
        lambda: trocar.crop(-1, 0, 1, 1),
        lambda: trocar.crop(0, 0, 0, 1),
        lambda: trocar.pool("mean"),  # type: ignore[arg-type]
        lambda: trocar.pool("avg", 0),
        lambda: trocar.pool("avg", ()),
        lambda: trocar.pool("avg", (1, 1, 1, 1)),
        lambda: trocar.pool("cls", 1),
        lambda: trocar.pool("gem", power=0),
        lambda: trocar.pool("gem", power=float("nan")),
        lambda: trocar.pool("avg", power=2),
        lambda: trocar.top_k(0),
        lambda: trocar.project(0),
        lambda: trocar.project(1, seed=2**63),
        lambda: trocar.pca(MEAN),
        lambda: trocar.pca(COMPONENTS, np.ones(2, np.float32)),
        lambda: trocar.pca(np.empty((0, 3), np.float32)),
        lambda: trocar.pca(SimpleNamespace(components=COMPONENTS, mean=MEAN), MEAN),
        lambda: trocar.pca(SimpleNamespace(components_=COMPONENTS, mean_=MEAN, whiten=True)),
        lambda: trocar.tap("fc", cast="int4"),  # type: ignore[arg-type]
        lambda: trocar.tap("fc", cast="int8", values=False, stats="mean"),
        lambda: trocar.tap("fc", cast="int8", channel_dim=1),
    ],
)
def test_values_out_of_range_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"[a-z]{3}"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: trocar.channels(1.0),  # type: ignore[arg-type]
        lambda: trocar.channels([True, False]),
        lambda: trocar.channels(np.array([True, False])),
        lambda: trocar.channels("12"),  # type: ignore[arg-type]
        lambda: trocar.index(None),  # type: ignore[arg-type]
        lambda: trocar.index((slice(1), [0, 1])),  # type: ignore[arg-type]
        lambda: trocar.index(True),
        lambda: trocar.pca(COMPONENTS.astype(np.int64)),
        lambda: trocar.pca([[1.0, 2.0]]),
        lambda: trocar.tap("fc", reduce=["avg"]),  # type: ignore[list-item]
        lambda: trocar.tap("fc", reduce="avg"),  # type: ignore[arg-type]
    ],
)
def test_values_of_the_wrong_type_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trocar.tap("fc", reduce="avg"), "reduce has 'avg'"),  # type: ignore[arg-type]
        (lambda: trocar.tap("fc", reduce=3), "reduce has 3"),  # type: ignore[arg-type]
        (lambda: trocar.tap("fc", index=[1, 2]), r"\[1, 2\] is not a position.*channels="),  # type: ignore[arg-type]
    ],
)
def test_a_likely_mistake_is_shown_whole_and_says_what_to_write(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_an_index_goes_out_as_numpy_means_it() -> None:
    items = trocar.index(np.s_[-1, ..., 1:, :8:2]).to_wire().index.items
    assert items[0].position == -1
    assert items[1].ellipsis
    assert (items[2].slice.start, items[2].slice.HasField("stop")) == (1, False)
    assert (items[3].slice.HasField("start"), items[3].slice.stop, items[3].slice.step) == (False, 8, 2)


def test_short_forms_come_first_in_a_fixed_order() -> None:
    tap = trocar.tap(
        "blocks", reduce=[trocar.gram()], index=np.s_[0], tokens=0, channels=[1], samples=slice(2)
    )
    kinds = [(message.WhichOneof("kind"), message.take.axis) for message in tap.to_wire().reductions]
    assert kinds == [
        ("take", pb.AXIS_SAMPLES),
        ("take", pb.AXIS_CHANNELS),
        ("take", pb.AXIS_TOKENS),
        ("index", 0),
        ("gram", 0),
    ]


def test_spans_are_of_the_whole_batch_and_so_come_first() -> None:
    tap = trocar.tap("x", samples=[1], tokens=[trocar.span("cat"), trocar.span(2, 5)])
    first, second = tap.to_wire().reductions
    assert [each.WhichOneof("kind") for each in first.spans.spans] == ["text", "characters"]
    assert list(second.take.positions) == [1]
    assert trocar.tokens("user") == trocar.tokens(trocar.span(role="user"))


@pytest.mark.parametrize(
    ("make", "given", "options", "kind", "message"),
    [
        (trocar.span, (), {}, TypeError, "two characters, a text or a role"),
        (trocar.span, (3,), {}, TypeError, "two characters, a text or a role"),
        (trocar.span, ("cat",), {"role": "user"}, TypeError, "two characters, a text or a role"),
        (trocar.span, (3, 3), {}, ValueError, "ends after its start"),
        (trocar.span, ("a" * 513,), {}, ValueError, "over 512 characters"),
        (trocar.tokens, ([0, trocar.span("cat")],), {}, TypeError, "not both in one list"),
        (
            trocar.tokens,
            ("lst",),
            {},
            ValueError,
            "tokens must be one of cls, last, system, user, assistant, not 'lst'; nearest: last",
        ),
    ],
)
def test_spans_that_mean_nothing_are_refused_at_once(
    make: Any, given: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make(*given, **options)


def test_one_reduction_may_be_given_alone() -> None:
    assert trocar.tap("layer4", reduce=trocar.pool("avg")).reduce == (trocar.pool("avg"),)


def test_channel_dim_has_a_meaning_with_reductions_and_scales() -> None:
    assert trocar.tap("stage", reduce=trocar.pool("avg"), channel_dim=-1).to_wire().channel_dim == -1
    assert trocar.tap("stage", cast="int8_per_channel", channel_dim=3).to_wire().channel_dim == 3


@pytest.mark.parametrize("name", CASTS)
def test_casts_go_out(name: Any) -> None:
    cast = trocar.tap("fc", cast=name).to_wire().cast
    assert tensor_pb2.Dtype.Name(cast.dtype) == f"DTYPE_{name.split('_')[0].upper()}"
    assert cast.is_per_channel == (name == "int8_per_channel")


def test_a_plain_tap_is_as_small_as_before() -> None:
    assert trocar.tap("fc").to_wire().ListFields() == trocar.tap("fc").to_wire().ListFields()[:1]
    assert trocar.tap("fc").payloads() == []


@pytest.mark.parametrize(
    "given",
    [
        (COMPONENTS, MEAN),
        (SimpleNamespace(components=COMPONENTS, mean=MEAN),),
        (SimpleNamespace(components_=COMPONENTS, mean_=MEAN),),
    ],
)
def test_components_and_mean_are_payloads_in_order(given: tuple[Any, ...]) -> None:
    tap = trocar.tap("layer4", reduce=[trocar.pca(COMPONENTS), trocar.pca(*given)])
    assert [payload.tobytes() for payload in tap.payloads()] == [
        COMPONENTS.tobytes(),
        COMPONENTS.tobytes(),
        MEAN.tobytes(),
    ]
    first, second = (message.pca for message in tap.to_wire().reductions)
    assert not first.HasField("mean")
    assert (list(second.components.shape), list(second.mean.shape)) == ([2, 3], [3])


def test_components_and_mean_get_the_wider_dtype() -> None:
    reduction = trocar.pca(COMPONENTS, MEAN.astype(np.float64))
    assert {tensor.dtype for tensor in reduction.tensors} == {tensor_pb2.DTYPE_FLOAT64}
    assert reduction.payloads()[0].nbytes == 48


def test_a_tap_does_not_change_with_the_arrays_that_it_was_made_of() -> None:
    components = COMPONENTS.copy()
    reduction = trocar.pca(components)
    components[:] = 7
    assert reduction.payloads()[0].tobytes() == COMPONENTS.tobytes()


def test_reductions_are_equal_and_hashable_by_what_they_say() -> None:
    made = {trocar.pool("avg"), trocar.pool("avg"), trocar.pool("max"), trocar.pca(COMPONENTS)}
    assert len(made) == 3
    assert trocar.pca(COMPONENTS) == trocar.pca(COMPONENTS)
    assert trocar.pca(COMPONENTS) != trocar.pca(COMPONENTS + 1)
    assert repr(trocar.pool("avg", 2)) == "Reduction(pool { kind: POOL_KIND_AVG size: 2 })"


def test_int8_is_rounded_once_to_float32() -> None:
    sent = np.arange(-127, 128, dtype=np.int8)
    scale = float(np.float32(0.1))
    exact = (sent.astype(np.float64) * scale).astype(np.float32)
    np.testing.assert_array_equal(dequantize(sent, [scale]), exact, strict=True)


def test_each_channel_is_multiplied_by_its_own_scale() -> None:
    sent = np.ones((2, 3, 4), np.int8)
    found = dequantize(sent, [1.0, 2.0, 3.0], 1)
    np.testing.assert_array_equal(found[1, :, 2], [1, 2, 3])
    assert dequantize(np.ones((), np.int8), [2.0]) == 2


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 scales"):
        dequantize(np.ones((2, 3), np.int8), [1.0, 2.0], 1)
