"""Loss values: selectors of loss terms, resolved to values of a pass."""

from collections.abc import Collection, Sequence

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Recording, Target, parse_selector, resolve
from trocar_server.surgery.axes.layout import Layout
from trocar_server.tensors.losses import LOSSES
from trocar_server.training.losses.class_dims import ClassDims
from trocar_server.training.losses.loss_function import Shape
from trocar_server.training.spec.trainer_spec import LossSpec


def loss_target(selector: str, recording: Recording) -> Target:
    """Return the target of a loss's selector, for a `TapSession`.

    Raises:
        ServiceError: It selects several values, or none that a loss can apply to; and what `resolve` raises.
    """
    return _one_value(selector, recording)[0]


def loss_leaf(selector: str, recording: Recording) -> Leaf:
    """Return the metadata of a loss's value; the model's output for an empty selector.

    Raises:
        ServiceError: See `loss_target`.
    """
    return _one_value(selector, recording)[1] if selector else _output(recording)


def loss_layout(selector: str, recording: Recording) -> Layout | None:
    """Return what the dimensions of a loss's value mean; None where that is not known.

    Raises:
        ServiceError: See `loss_target`.
    """
    if selector:
        return loss_target(selector, recording).layout
    last = len(recording.modules[""].calls) - 1
    layouts = recording.layouts
    return None if layouts is None else layouts.find("", last, "out", _output(recording).picks)


def known_shapes(
    losses: Sequence[LossSpec],
    recording: Recording,
    *,
    is_same_size: bool,
    class_dims: ClassDims,
    varying: Collection[int] = (),
) -> dict[int, Shape]:
    """Return the shapes of the values that terms compare with a target, by the position of the term.

    Args:
        losses: The terms, validated.
        recording: A recorded pass of the trained model.
        is_same_size: Whether samples have the same shape as in the recorded pass; otherwise only the number
            of classes and the number of dimensions are known.
        class_dims: Where values have their classes.
        varying: Sizes of the recorded pass's inputs that other samples need not have, for example of tokens.
    """
    shapes: dict[int, Shape] = {}
    for index, spec in enumerate(losses):
        if spec.teacher is None and LOSSES[spec.name].has_target:
            shape = loss_leaf(spec.selector, recording).shape or (0,)
            if not class_dims.has_samples_first(spec.selector, len(shape)):
                continue
            sizes = shape[1:]
            shapes[index] = (None, *(sizes if is_same_size else _lasting(spec, sizes, class_dims, varying)))
    return shapes


def _lasting(spec: LossSpec, sizes: Sequence[int], class_dims: ClassDims, varying: Collection[int]) -> Shape:
    """Return only the number of classes: not where it may be, for example, the number of tokens.

    Losses that compare element by element do not say which dimension that is: of frames of sound, and of
    images with channels last, the second one depends on the sample.
    """
    of_tokens, is_divergence = LOSSES[spec.name].of_tokens, spec.name == "kl_div"
    if not (is_divergence or LOSSES[spec.name].takes_indices):
        return [None] * len(sizes)
    rank = len(sizes) + 1
    of_classes = class_dims.of(spec, rank) - 1
    is_known = of_tokens or class_dims.known(spec.selector, rank) is not None
    return [
        size if index == of_classes and (is_known or size not in varying) else None
        for index, size in enumerate(sizes)
    ]


def _output(recording: Recording) -> Leaf:
    leaves = {leaf.picks: leaf for leaf in recording.modules[""].calls[-1].outputs if leaf.shape is not None}
    for picks in ((), ("logits",), ("out",), *(leaves if list(leaves) == [(0,)] else ())):
        if picks in leaves:
            return _of_floats(leaves[picks], "the model's output")
    raise _invalid(
        "the model does not return one tensor, `logits` or `out`; set the `selector` of each loss, for "
        'example `selector: "/out[0]"`'
    )


def _one_value(text: str, recording: Recording) -> tuple[Target, Leaf]:
    selector = parse_selector(text)
    if selector.kind not in ("module", "regex") or selector.is_gradient or selector.parameter is not None:
        raise _invalid(f"'{text}' is not a module's value; name one, for example `layer4` or `fc/in`")
    ((*values,),) = resolve([selector], recording)
    if len(values) != 1:
        shown = ", ".join(f"'{target.name}'" for target, _ in values[:5])
        raise _invalid(f"'{text}' means {len(values)} values ({shown}); a loss takes one")
    target, leaf = values[0]
    return target, _of_floats(leaf, f"'{text}'")


def _of_floats(leaf: Leaf, name: str) -> Leaf:
    if leaf.dtype is None or not leaf.dtype.is_floating_point:
        raise _invalid(
            f"{name} is of {str(leaf.dtype).removeprefix('torch.')}; a loss needs a value of floats"
        )
    return leaf


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
