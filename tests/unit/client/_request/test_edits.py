"""Edits become the messages of the contract, and what cannot be right is refused before anything is sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

import trocar
from trocar._request.edit_operations import CAST_DTYPES, NOISE_KINDS, NORM_SCOPES, OPERATIONS
from trocar_api.v1 import edit_pb2 as pb

FLOAT32, FLOAT64, BOOL = 1, 2, 10
INF, NAN = float("inf"), float("nan")


def test_the_tables_cover_the_contract() -> None:
    fields = {field.name for field in pb.Edit.DESCRIPTOR.oneofs_by_name["operation"].fields}
    assert OPERATIONS.keys() == fields - {"stored", "direction"}
    assert sorted(NOISE_KINDS.values()) == sorted(set(pb.NoiseKind.values()) - {0})
    assert sorted(NORM_SCOPES.values()) == sorted(set(pb.NormScope.values()) - {0})
    assert sorted(CAST_DTYPES) == ["bfloat16", "float16", "int8"]


@pytest.mark.parametrize(
    ("operation", "values", "options", "expected"),
    [
        ("set", [1.5], {}, "set { constant: 1.5 }"),
        ("set", [], {"value": np.float32(2)}, "set { constant: 2 }"),
        ("zero", [], {}, "zero {}"),
        ("add", [1], {}, "add { constant: 1 }"),
        ("scale", [0.0], {}, "scale { constant: 0 }"),
        ("scale", [[1, 2]], {}, "scale { tensor { dtype: DTYPE_INT64 shape: 2 } }"),
        ("affine", [2], {}, "affine { scale { constant: 2 } shift { constant: 0 } }"),
        ("clamp", [0], {}, "clamp { low: 0 }"),
        ("clamp", [], {"high": 1}, "clamp { high: 1 }"),
        ("clamp", [-1, 1], {}, "clamp { low: -1 high: 1 }"),
        ("noise", [0.5], {}, "noise { kind: NOISE_KIND_GAUSSIAN scale: 0.5 }"),
        ("noise", [0, "uniform", -7], {}, "noise { kind: NOISE_KIND_UNIFORM seed: -7 }"),
        ("mean_ablate", [], {}, "mean_ablate {}"),
        ("mean_ablate", [np.zeros(3)], {}, "mean_ablate { reference { dtype: DTYPE_FLOAT64 shape: 3 } }"),
        ("resample", [2**63 - 1], {}, "resample { seed: 9223372036854775807 }"),
        ("swap", ["clean"], {}, 'swap { source: "clean" }'),
        ("swap", [], {"at": "layer2"}, 'swap { selector: "layer2" }'),
        ("add_input", [], {}, "add_input {}"),
        (
            "steer",
            [np.ones(4, np.float32)],
            {"alpha": -2, "keep_norm": True},
            "steer { direction { dtype: DTYPE_FLOAT32 shape: 4 } alpha: -2 keeps_norm: true }",
        ),
        ("project_out", [np.eye(3)], {}, "project_out { basis { dtype: DTYPE_FLOAT64 shape: 3 shape: 3 } }"),
        (
            "project_onto",
            [[1.0, 0.0]],
            {},
            "project_onto { basis { dtype: DTYPE_FLOAT64 shape: 1 shape: 2 } }",
        ),
        ("top_k", [3], {}, "top_k { k: 3 }"),
        ("top_k", [3, -1, True], {}, "top_k { k: 3 dim: -1 is_absolute: true }"),
        ("dropout", [0.25, 9], {}, "dropout { probability: 0.25 seed: 9 }"),
        ("cast", ["int8"], {}, "cast { dtype: DTYPE_INT8 }"),
        ("skip", [], {}, "skip {}"),
        ("normalise", [1.0], {}, "normalise { max_norm: 1 scope: NORM_SCOPE_SAMPLE }"),
        (
            "normalise",
            [],
            {"max_norm": 2, "scope": "all", "exact": True},
            "normalise { max_norm: 2 scope: NORM_SCOPE_ALL is_exact: true }",
        ),
        ("nan_to_num", [], {}, "nan_to_num { nan: 0 }"),
        ("nan_to_num", [], {"posinf": 1, "neginf": -1}, "nan_to_num { nan: 0 posinf: 1 neginf: -1 }"),
    ],
)
def test_every_operation_is_the_message_of_the_contract(
    operation: Any, values: list[Any], options: dict[str, Any], expected: str
) -> None:
    made = trocar.edit("layer3", operation, *values, **options)
    message = text_format.Parse(f'selector: "layer3" {expected}', pb.Edit())
    assert made.to_wire() == message
    assert made.to_wire().SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"channels": [1, 2]}, "region { takes { axis: AXIS_CHANNELS positions: 1 positions: 2 } }"),
        (
            {"samples": 0, "tokens": slice(-2, None), "order": "after"},
            "order: EDIT_ORDER_AFTER_TAPS region { takes { axis: AXIS_SAMPLES positions: 0 } "
            "takes { axis: AXIS_TOKENS positions: -2 positions: -1 } }",
        ),
        (
            {"index": np.s_[:, 3:8, ..., -1]},
            "region { index { items { slice {} } items { slice { start: 3 stop: 8 } } "
            "items { ellipsis: true } items { position: -1 } } }",
        ),
        (
            {"tokens": trocar.span("cat"), "samples": 0},
            'region { takes { axis: AXIS_SAMPLES positions: 0 } spans { spans { text: "cat" } } }',
        ),
        (
            {"tokens": [trocar.span(1, 3, decoder=True), trocar.span("a", decoder=True)]},
            "region { spans { spans { characters { start: 1 stop: 3 } } spans { text: 'a' } "
            "is_decoder: true } }",
        ),
        ({"tokens": "user"}, "region { spans { spans { role: 'user' } } }"),
        (
            {"mask": [[True, False]]},
            "region { mask { dtype: DTYPE_BOOL shape: 1 shape: 2 } }",
        ),
        (
            {"channels": 1, "channel_dim": -1},
            "channel_dim: -1 region { takes { axis: AXIS_CHANNELS positions: 1 } }",
        ),
    ],
)
def test_the_part_and_the_order_are_the_message_of_the_contract(
    options: dict[str, Any], expected: str
) -> None:
    message = text_format.Parse(f'selector: "layer3" zero {{}} {expected}', pb.Edit())
    assert trocar.edit("layer3", "zero", **options).to_wire() == message


def test_arrays_go_along_the_mask_first() -> None:
    mask, scale, shift = np.array([True, False]), np.arange(2, dtype=np.float32), np.ones(2)
    made = trocar.edit("x", "affine", scale, shift=shift, mask=mask)
    assert [bytes(payload) for payload in made.payloads()] == [
        mask.tobytes(),
        scale.tobytes(),
        shift.tobytes(),
    ]
    tensors = [made.message.region.mask, made.message.affine.scale.tensor, made.message.affine.shift.tensor]
    assert [(tensor.dtype, *tensor.shape) for tensor in tensors] == [(BOOL, 2), (FLOAT32, 2), (FLOAT64, 2)]


def test_a_later_change_of_an_array_does_not_reach_the_edit() -> None:
    direction = np.ones(3, np.float32)
    made = trocar.edit("x", "steer", direction)
    direction[:] = 7
    assert bytes(made.payloads()[0]) == np.ones(3, np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_of_torch_are_sent_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, -2.0], [0.0, 3.0]]).to(dtype).t()
    made = trocar.edit("x", "set", tensor)
    expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert [bytes(payload) for payload in made.payloads()] == [expected]


def test_a_big_endian_array_is_sent_little_endian() -> None:
    made = trocar.edit("x", "set", np.arange(3, dtype=">i4"))
    assert bytes(made.payloads()[0]) == np.arange(3, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("operation", "values", "options", "error", "match"),
    [
        ("scal", [1], {}, ValueError, "did you mean scale.* available: set, zero, add"),
        ("ablate", [], {}, ValueError, "mean_ablate"),
        ("scale", [], {"facto": 1}, TypeError, "no option 'facto'; did you mean factor"),
        ("zero", [], {"chanels": [1]}, TypeError, "did you mean channels"),
        ("scale", [], {}, TypeError, r"missing a required argument: 'factor'.* scale\(factor\)"),
        ("zero", [1], {}, TypeError, "too many positional arguments"),
        ("scale", [1], {"factor": 2}, TypeError, "multiple values"),
        ("scale", ["2"], {}, TypeError, "factor is a number or an array, not '2'"),
        ("scale", [1j], {}, TypeError, "not complex"),
        ("scale", [None], {}, TypeError, "not NoneType"),
        ("scale", [["a"]], {}, TypeError, "not numbers"),
        ("scale", [[[1], [1, 2]]], {}, ValueError, "different lengths"),
        ("scale", [[]], {}, ValueError, "so it is empty"),
        ("scale", [np.zeros((1,) * 9)], {}, ValueError, "9 dimensions"),
        ("scale", [10**400], {}, ValueError, "inf"),
        ("clamp", [], {}, ValueError, "low, high or both"),
        ("clamp", [2, 1], {}, ValueError, "low 2.0 is above high 1.0"),
        ("noise", [-1], {}, ValueError, "at least 0"),
        ("noise", [1, "laplace"], {}, ValueError, "gaussian, uniform"),
        ("noise", [1], {"seed": 2**63}, ValueError, "seed"),
        ("noise", [1], {"seed": 0.5}, TypeError, "whole number"),
        ("swap", [], {}, ValueError, "source=.*at="),
        ("swap", [""], {}, ValueError, "source is empty"),
        ("swap", [3], {}, TypeError, "source must be a string"),
        ("steer", [np.zeros((1, 1, 2))], {}, ValueError, "1 or 2 dimensions"),
        ("steer", [1.0], {}, ValueError, r"shape \(\)"),
        ("steer", [[1.0]], {"keep_norm": "false"}, TypeError, "True or False"),
        ("project_out", [np.zeros((0, 3))], {}, ValueError, "so it is empty"),
        ("top_k", [0], {}, ValueError, "must be 1 to"),
        ("top_k", [1.5], {}, TypeError, "whole number"),
        ("top_k", [1, 2**31], {}, ValueError, "dim"),
        ("dropout", [1.0], {}, ValueError, "0 to below 1"),
        ("dropout", [-0.1], {}, ValueError, "0 to below 1"),
        ("cast", ["float32"], {}, ValueError, "float16, bfloat16, int8"),
        ("skip", [], {"channels": 1}, ValueError, "whole call"),
        ("skip", [], {"mask": [True]}, ValueError, "whole call"),
        ("normalise", [0], {}, ValueError, "above 0"),
        ("normalise", [1, "token"], {}, ValueError, "sample, channel_vector, all"),
        ("zero", [], {"order": "later"}, ValueError, "before, after"),
        ("zero", [], {"channel_dim": 1}, ValueError, "channel_dim is not used"),
        ("zero", [], {"mask": [1, 0]}, TypeError, "a mask must be bool, not int64"),
        ("zero", [], {"mask": [True], "channels": 1}, ValueError, "not both"),
        ("zero", [], {"mask": [True], "index": np.s_[0]}, ValueError, "not both"),
        ("zero", [], {"mask": [True], "tokens": trocar.span("a")}, ValueError, "not both"),
        ("zero", [], {"index": np.s_[0], "tokens": trocar.span("a")}, ValueError, "not both"),
        (
            "zero",
            [],
            {"tokens": "last"},
            ValueError,
            "tokens must be one of system, user, assistant, not 'last'",
        ),
        ("zero", [], {"tokens": [trocar.span("a"), 1]}, TypeError, "not both in one list"),
        (
            "zero",
            [],
            {"tokens": [trocar.span("a"), trocar.span("a", decoder=True)]},
            ValueError,
            "all of the decoder's texts, or none",
        ),
        ("zero", [], {"index": np.s_[::-1]}, ValueError, "step"),
        ("zero", [], {"channels": []}, ValueError, "no positions"),
        ("zero", [], {"channels": [0.5]}, TypeError, "is not a position"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(
    operation: Any, values: list[Any], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        trocar.edit("layer3", operation, *values, **options)


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: trocar.edit("x", "set", x),
        lambda x: trocar.edit("x", "add", np.array([1.0, x])),
        lambda x: trocar.edit("x", "scale", np.array([x], np.float16)),
        lambda x: trocar.edit("x", "scale", np.array([complex(0, x)], np.complex64)),
        lambda x: trocar.edit("x", "set", torch.tensor([1.0, x], dtype=torch.bfloat16)),
        lambda x: trocar.edit("x", "affine", shift=x),
        lambda x: trocar.edit("x", "clamp", low=x),
        lambda x: trocar.edit("x", "noise", x),
        lambda x: trocar.edit("x", "mean_ablate", [x]),
        lambda x: trocar.edit("x", "steer", [1.0], alpha=x),
        lambda x: trocar.edit("x", "project_onto", [[x]]),
        lambda x: trocar.edit("x", "dropout", x),
        lambda x: trocar.edit("x", "normalise", x),
        lambda x: trocar.edit("x", "nan_to_num", posinf=x),
    ],
)
def test_nothing_nan_or_infinite_is_sent(make: Callable[[float], object], wrong: float) -> None:
    with pytest.raises(ValueError, match="only finite numbers"):
        make(wrong)


def test_the_largest_finite_bfloat16_is_no_infinity() -> None:
    largest = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    assert bytes(trocar.edit("x", "set", largest).payloads()[0]) == b"\x7f\x7f"


@pytest.mark.parametrize("selector", ["", "  "])
def test_an_edit_is_somewhere(selector: str) -> None:
    with pytest.raises(ValueError, match="the selector is empty"):
        trocar.edit(selector, "zero")


def test_a_selector_written_from_its_parts_is_one() -> None:
    made = trocar.edit(trocar.selector("blocks.a:b", port="grad_out"), "zero")
    assert made.message.selector == 'blocks."a:b"/grad_out'


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            trocar.edit("layer3", "scale", 0.0, channels=[1, 2]),
            "edit('layer3', 'scale', 0.0, channels=[1, 2])",
        ),
        (
            trocar.edit("x", "steer", [1.0], alpha=0),
            "edit('x', 'steer', direction=<float64 (1,)>, alpha=0.0)",
        ),
        (trocar.edit("x", "noise", 1, "uniform", 3), "edit('x', 'noise', kind='uniform', scale=1.0, seed=3)"),
        (trocar.edit("x", "clamp", high=0), "edit('x', 'clamp', high=0.0)"),
        (trocar.edit("x", "cast", "int8", order="after"), "edit('x', 'cast', dtype='int8', order='after')"),
        (trocar.edit("x", "swap", "a", "y"), "edit('x', 'swap', source='a', at='y')"),
        (
            trocar.edit("x", "normalise", 1, "channel_vector", True, channel_dim=-1),
            "edit('x', 'normalise', max_norm=1.0, scope='channel_vector', exact=True, channel_dim=-1)",
        ),
        (
            trocar.edit("x", "zero", index=np.s_[0, ..., 1:, ::2]),
            "edit('x', 'zero', index=np.s_[0, ..., 1:, ::2])",
        ),
        (
            trocar.edit("x", "zero", samples=1, tokens=trocar.span("cat")),
            "edit('x', 'zero', samples=[1], tokens=trocar.span('cat'))",
        ),
        (
            trocar.edit(
                "x", "zero", tokens=[trocar.span(1, 3, decoder=True), trocar.span("a", decoder=True)]
            ),
            "edit('x', 'zero', tokens=[trocar.span(1, 3, decoder=True), trocar.span('a', decoder=True)])",
        ),
        (trocar.edit("x", "zero", tokens="user"), "edit('x', 'zero', tokens=trocar.span(role='user'))"),
        (trocar.edit("x", "zero", mask=[True]), "edit('x', 'zero', mask=<bool (1,)>)"),
        (
            trocar.edit("x", "zero", channels=range(1000)),
            "edit('x', 'zero', channels=[0, 1, 2, 3, 4, 5, 6, 7, ... 992 more])",
        ),
    ],
)
def test_an_edit_shows_as_it_was_written(made: trocar.Edit, expected: str) -> None:
    assert repr(made) == expected


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_shows_by_its_name(name: Any) -> None:
    values: dict[str, Any] = dict.fromkeys(("set", "add", "scale", "noise", "top_k", "normalise", "clamp"), 1)
    values |= {key: [1.0] for key in ("steer", "project_out", "project_onto")}
    values |= {"dropout": 0.5, "swap": "a", "cast": "int8"}
    given = [values[name]] if name in values else []
    given = [[1.0], 0.5] if name == "cap" else given
    assert repr(trocar.edit("x", name, *given)).startswith(f"edit('x', '{name}'")


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (
            trocar.edit("x", "steer", "honest", alpha=4, units="norm"),
            "edit('x', 'steer', 'honest', alpha=4.0, units='norm')",
        ),
        (trocar.edit("x", "project_out", "honest"), "edit('x', 'project_out', 'honest')"),
        (trocar.edit("x", "cap", "honest", high=1), "edit('x', 'cap', 'honest', high=1.0)"),
    ],
)
def test_an_edit_with_a_direction_shows_as_it_was_written(made: trocar.Edit, shown: str) -> None:
    assert repr(made) == shown


def test_units_are_for_stored_directions() -> None:
    with pytest.raises(ValueError, match="for stored directions, by name"):
        trocar.edit("x", "steer", [1.0], units="norm")
    with pytest.raises(ValueError, match="cannot be the name of a direction"):
        trocar.edit("x", "steer", "No Name")


def test_equal_edits_are_equal_and_serve_as_keys() -> None:
    one, same = (trocar.edit("x", "add", np.ones(2)) for _ in range(2))
    assert one == same
    assert len({one, same}) == 1
    assert one != trocar.edit("x", "add", np.zeros(2))  # the same message, other bytes
