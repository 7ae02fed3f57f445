"""Which value of a pass each term of a loss is of."""

from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Recording, Target, parse_selector, resolve
from trocar_server.training.loss_targets import Shape
from trocar_server.training.spec import LossSpec


def loss_target(selector: str, recording: Recording) -> Target:
    """Return the one value that a loss with this selector is of, for a `TapSession`.

    Raises:
        ServiceError: It means several values or none that a loss can be of, or as `resolve` says.
    """
    return _one_value(selector, recording)[0]


def loss_leaf(selector: str, recording: Recording) -> Leaf:
    """Return what is known about the value of a loss; the output for an empty selector.

    Raises:
        ServiceError: See `loss_target`.
    """
    return _one_value(selector, recording)[1] if selector else _output(recording)


def known_shapes(losses: Sequence[LossSpec], recording: Recording, *, is_same_size: bool) -> dict[str, Shape]:
    """Return the shapes of values by selector, for `LossFunction.check_targets`.

    Args:
        losses: The terms, checked.
        recording: A pass of the trained model.
        is_same_size: Whether samples have the shape that they had in that pass; otherwise only the number of
            classes and that of dimensions are known.
    """
    shapes: dict[str, Shape] = {}
    for spec in losses:
        _, *sizes = loss_leaf(spec.selector, recording).shape or (0,)
        rest = sizes[1:] if is_same_size else [None] * len(sizes[1:])
        shapes[spec.selector] = (None, *sizes[:1], *rest)
    return shapes


def _output(recording: Recording) -> Leaf:
    leaves = {leaf.picks: leaf for leaf in recording.modules[""].calls[-1].outputs if leaf.shape is not None}
    for picks in ((), ("logits",), ("out",), *(leaves if list(leaves) == [(0,)] else ())):
        if picks in leaves:
            return _of_floats(leaves[picks], "the model's output")
    raise _invalid(
        "the model does not return one tensor, `logits` or `out`; say in each loss which value it is of, for "
        'example `selector: "/out[0]"`'
    )


def _one_value(text: str, recording: Recording) -> tuple[Target, Leaf]:
    selector = parse_selector(text)
    if selector.kind not in ("module", "regex") or selector.is_gradient or selector.parameter is not None:
        raise _invalid(f"'{text}' is no value of a module; a loss is of one, for example `layer4` or `fc/in`")
    ((*values,),) = resolve([selector], recording)
    if len(values) != 1:
        shown = ", ".join(f"'{target.name}'" for target, _ in values[:5])
        raise _invalid(f"'{text}' means {len(values)} values ({shown}); a loss is of one")
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
