"""Edit texts: the arguments of `trocar.edit`, read back from the message."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from trocar._base.tensors import DTYPE_NAMES
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import position_pb2, reduction_pb2, tap_pb2, tensor_pb2

_MOST_POSITIONS = 8

_OPTION_NAMES = {
    "keeps_norm": "keep_norm",
    "is_absolute": "absolute",
    "is_exact": "exact",
    "is_relative": "relative",
    "selector": "at",
}
"""Names of options that differ from the wire's."""

_AXIS_NAMES: dict[int, str] = {
    reduction_pb2.AXIS_SAMPLES: "samples",
    reduction_pb2.AXIS_CHANNELS: "channels",
    reduction_pb2.AXIS_TOKENS: "tokens",
}


def edit_text(message: pb.Edit) -> str:
    """Return an edit as it would be written, for example `edit('layer3', 'scale', 0.0, channels=[1, 2])`.

    Arrays show as their dtype and shape.
    """
    kind = message.WhichOneof("operation")
    if kind == "stored":
        return repr(message.stored)
    if kind is None:
        return f"edit({message.selector!r}, an operation that this client does not know)"
    words = [repr(message.selector or _path(message.parts))]
    if kind == "direction":
        words += _direction_words(message.direction)
    else:
        words += [repr(kind), *_operation_words(getattr(message, kind))]
    words += _region_words(message.region)
    if message.HasField("positions"):
        words.append(f"positions={positions_text(message.positions)}")
    if message.order == pb.EDIT_ORDER_AFTER_TAPS:
        words.append("order='after'")
    if message.HasField("channel_dim"):
        words.append(f"channel_dim={message.channel_dim}")
    return f"edit({', '.join(words)})"


def positions_text(message: position_pb2.Positions) -> str:
    """Return positions of texts as they would be written, for example `trocar.positions(prompt=[-1])`."""
    words = [
        f"{name}={_set_text(getattr(message, name))}"
        for name in ("prompt", "generated")
        if message.HasField(name)
    ]
    if message.spans:
        shown = ", ".join(_span_text(each, False) for each in message.spans[:_MOST_POSITIONS])
        words.append(f"spans=[{shown}{_more(len(message.spans))}]")
    if message.token_ids:
        words.append(f"token_ids={_numbers_text(message.token_ids)}")
    if message.HasField("but_not"):
        words.append(f"but_not={positions_text(message.but_not)}")
    if message.HasField("when"):
        words.append(f"when={_gate_text(message.when)}")
    return f"trocar.positions({', '.join(words)})"


def _gate_text(gate: position_pb2.Gate) -> str:
    words = [repr(gate.direction), *([repr(gate.place)] if gate.place else [])]
    words += [f"{end}={getattr(gate, end)!r}" for end in ("above", "below") if gate.HasField(end)]
    return f"trocar.gate({', '.join(words)})"


def _set_text(chosen: position_pb2.PositionSet) -> str:
    kind = chosen.WhichOneof("kind")
    if kind == "list":
        return _numbers_text(chosen.list.positions)
    if kind != "range":
        return "'all'"
    bounds = [
        repr(getattr(chosen.range, name)) if chosen.range.HasField(name) else "None"
        for name in ("start", "stop", "step")
    ]
    return f"slice({', '.join(bounds)})"


def _numbers_text(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_POSITIONS]))
    return f"[{shown}{_more(len(numbers))}]"


def _more(count: int) -> str:
    return f", ... {count - _MOST_POSITIONS:,} more" if count > _MOST_POSITIONS else ""


def index_text(index: reduction_pb2.IndexReduction) -> str:
    """Return an index expression as it is written between brackets, for example `:, 3:8`."""
    return ", ".join(_item_text(item) for item in index.items)


def tensor_text(spec: tensor_pb2.TensorSpec) -> str:
    """Return dtype and shape of an array, for example `<float32 (512,)>`."""
    return f"<{DTYPE_NAMES.get(spec.dtype, 'unknown')} {tuple(spec.shape)}>"


def _direction_words(direction: pb.DirectionEdit) -> list[str]:
    """Return operation, name and options of an edit with a stored direction."""
    kind = direction.WhichOneof("kind")
    words = [repr(kind), repr(direction.name)]
    if kind in ("steer", "cap"):
        words += _operation_words(getattr(direction, kind))
        words += ["units='norm'"] if direction.units == pb.DIRECTION_UNITS_NORM else []
    return words


def _operation_words(operation: Message) -> list[str]:
    if isinstance(operation, pb.Operand):
        return [_value_text(operation)]
    return [
        f"{_OPTION_NAMES.get(field.name, field.name)}={_field_text(field, getattr(operation, field.name))}"
        for field in operation.DESCRIPTOR.fields
        if _is_said(field, operation)
    ]


def _is_said(field: Any, operation: Message) -> bool:
    """Whether a field is set; a number without presence always is, a flag or a name when it is not empty."""
    if field.has_presence:
        return operation.HasField(field.name)
    is_number = field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_INT32)
    return is_number or bool(getattr(operation, field.name))


def _field_text(field: Any, value: Any) -> str:
    if field.enum_type is None:
        return _value_text(value)
    names = {number: entry.name for number, entry in field.enum_type.values_by_number.items()}
    prefix = names[0].removesuffix("UNSPECIFIED")
    return repr(names.get(value, str(value)).removeprefix(prefix).lower())


def _value_text(value: Any) -> str:
    if isinstance(value, pb.Operand):
        return repr(value.constant) if value.HasField("constant") else tensor_text(value.tensor)
    return tensor_text(value) if isinstance(value, tensor_pb2.TensorSpec) else repr(value)


def _region_words(region: pb.EditRegion) -> list[str]:
    words = [f"{_AXIS_NAMES.get(take.axis, 'unknown')}={_positions(take)}" for take in region.takes]
    if region.HasField("index"):
        words.append(f"index=np.s_[{index_text(region.index)}]")
    if region.HasField("spans"):
        words.append(f"tokens={_spans_text(region.spans)}")
    if region.HasField("mask"):
        words.append(f"mask={tensor_text(region.mask)}")
    return words


def _spans_text(wanted: reduction_pb2.SpanReduction) -> str:
    result = [_span_text(span, wanted.is_decoder) for span in wanted.spans[:_MOST_POSITIONS]]
    return result[0] if len(result) == 1 else f"[{', '.join(result)}{_more(len(wanted.spans))}]"


def _span_text(span: reduction_pb2.TextSpan, is_decoder: bool) -> str:
    kind = span.WhichOneof("kind")
    own = ", decoder=True" if is_decoder else ""
    if kind == "characters":
        return f"trocar.span({span.characters.start}, {span.characters.stop}{own})"
    return f"trocar.span({'role=' if kind == 'role' else ''}{getattr(span, kind or 'text')!r}{own})"


def _positions(take: reduction_pb2.TakeReduction) -> str:
    return _numbers_text(take.positions)


def _item_text(item: reduction_pb2.IndexItem) -> str:
    if item.HasField("position"):
        return str(item.position)
    if not item.HasField("slice"):
        return "..."
    start = str(item.slice.start) if item.slice.HasField("start") else ""
    stop = str(item.slice.stop) if item.slice.HasField("stop") else ""
    return f"{start}:{stop}:{item.slice.step}" if item.slice.HasField("step") else f"{start}:{stop}"


def _path(parts: tap_pb2.SelectorParts) -> str:
    """Return the path of a selector in parts, with its port; only for people to read."""
    return f"{parts.path}/{parts.port}" if parts.port else parts.path
