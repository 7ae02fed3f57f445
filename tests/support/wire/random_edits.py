"""Hypothesis strategies of edits, objectives and sources on the wire: mostly fine, some odd."""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import extraction_pb2, objective_pb2, reduction_pb2, tensor_pb2

_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
FORWARD = [
    "conv",
    "conv2",
    "relu@0",
    "relu@-1",
    "fc",
    "fc/in",
    "/in",
    "/out",
    "pool",
    "**",
    "*:Conv2d",
    "fn:relu@0",
]
PARAMETERS = ["fc/param(weight)", "conv/param(*)", "*/param(bias)"]
GRADIENTS = ["fc/grad_out", "fc/grad_in", "/grad_in", "conv/param_grad(weight)", "**/param_grad(*)"]
ODD = ["relu", "unused", "nowhere", "conv[", "conv@99", "fx:add", "fn:sdpa/scores", "/", "", "split[0]"]


def rarely(odd: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw the odd one in one case of 24: a request has many parts, and one odd part is enough."""
    return st.integers(0, 23).flatmap(lambda number: usual if number else odd)


NUMBERS = rarely(st.floats(), st.floats(-2, 2))
SEEDS = _INT64
_SMALL = rarely(_INT32, st.integers(0, 4))
_SHAPES = st.sampled_from(
    [(), (5,), (4,), (1, 5), (2, 5), (4, 8, 8), (1, 4, 8, 8), (4, 1, 1), (2, 4), (0,), (1, 2**62, 0)]
)
SPECS = st.builds(
    tensor_pb2.TensorSpec,
    dtype=rarely(_INT32, st.sampled_from([1, 1, 1, 1, 2, 4, 5, 9, 10])),
    shape=rarely(st.lists(_INT64, max_size=10), _SHAPES),
)
_MASKS = st.builds(tensor_pb2.TensorSpec, dtype=st.just(10), shape=_SHAPES)
OPERANDS = rarely(
    st.just(pb.Operand()), st.builds(pb.Operand, constant=NUMBERS) | st.builds(pb.Operand, tensor=SPECS)
)
_BASES = rarely(
    SPECS,
    st.builds(
        tensor_pb2.TensorSpec,
        dtype=st.just(1),
        shape=st.sampled_from([(1, 4), (2, 4), (5, 4), (3, 5), (2, 3)]),
    ),
)
_DIRECTIONS = rarely(
    SPECS,
    st.builds(
        tensor_pb2.TensorSpec, dtype=st.just(1), shape=st.sampled_from([(4,), (5,), (2, 4), (2, 5), (3,)])
    ),
)
_UP = rarely(st.floats(), st.floats(0, 0.999))
FORWARD_SELECTORS = rarely(_TEXT | st.sampled_from(ODD), st.sampled_from([*FORWARD, *PARAMETERS]))
ALL_SELECTORS = FORWARD_SELECTORS | st.sampled_from(GRADIENTS)
_VALUES = rarely(_TEXT | st.sampled_from(ODD + PARAMETERS + GRADIENTS), st.sampled_from(FORWARD))
_POSITIONS = rarely(st.lists(_INT64, max_size=3), st.lists(st.integers(-3, 3), min_size=1, max_size=3))
_ITEMS = st.one_of(
    st.builds(reduction_pb2.IndexItem, position=rarely(_INT64, st.integers(-3, 3))),
    st.builds(
        reduction_pb2.IndexItem,
        slice=st.builds(
            reduction_pb2.IndexSlice,
            start=st.none() | _SMALL,
            stop=st.none() | _SMALL,
            step=st.none() | st.integers(-1, 3),
        ),
    ),
    st.builds(reduction_pb2.IndexItem, ellipsis=rarely(st.just(False), st.just(True))),
)
_TAKES = st.lists(
    st.builds(reduction_pb2.TakeReduction, axis=rarely(_INT32, st.integers(1, 3)), positions=_POSITIONS),
    max_size=2,
    unique_by=lambda take: take.axis,
)
_POSITIONAL = st.builds(
    pb.EditRegion,
    index=st.none() | st.builds(reduction_pb2.IndexReduction, items=st.lists(_ITEMS, max_size=2)),
    takes=_TAKES,
    mask=rarely(SPECS, st.none()),
)
REGIONS = _POSITIONAL | st.builds(pb.EditRegion, mask=rarely(SPECS, _MASKS))
OPERATIONS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    *(st.fixed_dictionaries({name: OPERANDS}) for name in ("set", "add", "scale")),
    *(
        st.just({name: kind()})
        for name, kind in (("zero", pb.ZeroEdit), ("add_input", pb.AddInputEdit), ("skip", pb.SkipEdit))
    ),
    st.builds(pb.AffineEdit, scale=st.none() | OPERANDS, shift=st.none() | OPERANDS).map(
        lambda m: {"affine": m}
    ),
    st.builds(pb.ClampEdit, low=st.none() | NUMBERS, high=st.none() | NUMBERS).map(lambda m: {"clamp": m}),
    st.builds(pb.NoiseEdit, kind=rarely(_INT32, st.integers(1, 2)), scale=_UP, seed=SEEDS).map(
        lambda m: {"noise": m}
    ),
    st.builds(pb.MeanAblateEdit, reference=st.none() | SPECS).map(lambda m: {"mean_ablate": m}),
    st.builds(pb.ResampleEdit, seed=SEEDS).map(lambda m: {"resample": m}),
    st.builds(
        pb.SwapEdit, source=rarely(_TEXT, st.sampled_from(["", "a"])), selector=st.just("") | _VALUES
    ).map(lambda m: {"swap": m}),
    st.builds(
        pb.SteerEdit,
        direction=_DIRECTIONS,
        alpha=NUMBERS,
        keeps_norm=st.booleans(),
        is_relative=st.booleans(),
    ).map(lambda m: {"steer": m}),
    *(
        st.builds(pb.ProjectEdit, basis=_BASES).map(lambda m, name=name: {name: m})  # type: ignore[misc]
        for name in ("project_out", "project_onto")
    ),
    st.builds(
        pb.TopKEdit,
        k=rarely(_INT32, st.integers(1, 3)),
        dim=st.none() | st.integers(-4, 4),
        is_absolute=st.booleans(),
    ).map(lambda m: {"top_k": m}),
    st.builds(pb.DropoutEdit, probability=_UP, seed=SEEDS).map(lambda m: {"dropout": m}),
    st.builds(pb.CastEdit, dtype=rarely(_INT32, st.sampled_from([3, 4, 6]))).map(lambda m: {"cast": m}),
    st.builds(
        pb.NormaliseEdit, max_norm=_UP, scope=rarely(_INT32, st.integers(0, 3)), is_exact=st.booleans()
    ).map(lambda m: {"normalise": m}),
    st.builds(
        pb.NanToNumEdit, nan=st.none() | NUMBERS, posinf=st.none() | NUMBERS, neginf=st.none() | NUMBERS
    ).map(lambda m: {"nan_to_num": m}),
    rarely(st.just({}), st.just({"stored": "kept"})),
)


_ORDERS = rarely(_INT32, st.integers(0, 2))
_CHANNEL_DIMS = rarely(_INT32, st.none() | st.integers(-3, 3))


def edits_at(selectors: st.SearchStrategy[str]) -> st.SearchStrategy[pb.Edit]:
    """Return a strategy of edits at these places."""
    return st.builds(_edit, OPERATIONS, selectors, st.none() | REGIONS, _ORDERS, _CHANNEL_DIMS)


def _edit(
    operation: dict[str, Any], selector: str, region: pb.EditRegion | None, order: Any, dim: int | None
) -> pb.Edit:
    if "stored" in operation and selector != ODD[0]:
        return pb.Edit(**operation)
    return pb.Edit(**operation, selector=selector, region=region, order=order, channel_dim=dim)


_LABELS = rarely(
    SPECS,
    st.builds(tensor_pb2.TensorSpec, dtype=st.just(9), shape=st.just((2,)))
    | st.builds(tensor_pb2.TensorSpec, dtype=st.just(1), shape=st.just((2, 5))),
)
_CLASSES = rarely(st.lists(_INT64, max_size=3), st.lists(st.integers(0, 4), min_size=1, max_size=2))
_SIMPLE_REDUCTIONS = st.builds(
    reduction_pb2.Reduction,
    pool=st.builds(
        reduction_pb2.PoolReduction, kind=st.integers(1, 4), size=st.lists(st.integers(1, 4), max_size=2)
    ),
) | st.builds(
    reduction_pb2.Reduction,
    index=st.builds(reduction_pb2.IndexReduction, items=st.lists(_ITEMS, max_size=3)),
)
_SCORES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        objective_pb2.ClassScore,
        selector=st.just("") | _VALUES,
        classes=_CLASSES,
        kind=rarely(_INT32, st.integers(0, 3)),
    ).map(lambda m: {"class_score": m}),
    st.builds(
        objective_pb2.ValueScore,
        selector=_VALUES | FORWARD_SELECTORS,
        reductions=st.lists(_SIMPLE_REDUCTIONS, max_size=2) | st.just([]),
        channel_dim=rarely(_INT32, st.none()),
        function=rarely(_INT32, st.integers(0, 4)),
        aggregate=rarely(_INT32, st.integers(0, 3)),
    ).map(lambda m: {"value_score": m}),
    st.builds(
        objective_pb2.Loss,
        kind=rarely(_INT32, st.integers(1, 7)),
        selector=st.just("") | _VALUES,
        labels=_LABELS,
        is_sum=st.booleans(),
    ).map(lambda m: {"loss": m}),
    st.just({"class_score": objective_pb2.ClassScore(classes=[1])}),
)


def _objectives(scores: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[objective_pb2.Objective]:
    terms = st.builds(
        lambda score, weight: objective_pb2.ObjectiveTerm(**score, weight=weight), scores, st.none() | NUMBERS
    )
    return st.builds(
        objective_pb2.Objective,
        terms=rarely(st.lists(terms, max_size=3), st.lists(terms, min_size=1, max_size=1)),
    )


_PENALTIES: st.SearchStrategy[dict[str, Any]] = st.builds(
    objective_pb2.GradientPenalty,
    of=_objectives(_SCORES),
    selector=st.just("") | _VALUES | FORWARD_SELECTORS,
    center=NUMBERS,
).map(lambda m: {"gradient_penalty": m})
OBJECTIVES = _objectives(_SCORES | _SCORES | _PENALTIES)


def tensors_of(edit: pb.Edit) -> Iterator[tensor_pb2.TensorSpec]:
    """Yield the tensors of an edit in the order of their payloads: a mask, then those of the operation."""
    if edit.region.HasField("mask"):
        yield edit.region.mask
    operation = edit.WhichOneof("operation")
    if operation is not None and operation != "stored":
        yield from _parts(getattr(edit, operation))


def _parts(message: Any) -> Iterator[tensor_pb2.TensorSpec]:
    for descriptor, value in message.ListFields():
        if descriptor.message_type is tensor_pb2.TensorSpec.DESCRIPTOR:
            yield value
        elif descriptor.message_type is pb.Operand.DESCRIPTOR:
            yield from _parts(value)


def labels_of(objective: objective_pb2.Objective) -> Iterator[tensor_pb2.TensorSpec]:
    """Yield the tensors of an objective in the order of their payloads."""
    for term in objective.terms:
        if term.HasField("loss"):
            yield term.loss.labels
        if term.HasField("gradient_penalty"):
            yield from labels_of(term.gradient_penalty.of)


def sources_of(
    inputs: st.SearchStrategy[extraction_pb2.Input],
) -> st.SearchStrategy[list[extraction_pb2.SourceInputs]]:
    """Return a strategy of the sources of a request."""
    return st.lists(
        st.builds(
            extraction_pb2.SourceInputs,
            name=rarely(_TEXT, st.sampled_from(["a", "b"])),
            inputs=rarely(st.lists(inputs, max_size=2), st.lists(inputs, min_size=1, max_size=1)),
        ),
        max_size=2,
    )
