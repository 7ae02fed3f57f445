"""Edits: declared changes to values and gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from trocar._base.delegation import explained
from trocar._base.tensors import WireTensor
from trocar._request.edit_operations import EditOperation, build_operation
from trocar._request.edit_texts import edit_text
from trocar._request.inputs import ArrayLike
from trocar._request.operands import Numbers, dimension, mask_tensor, one_of, spec, text
from trocar._request.positions import (
    IndexExpression,
    Positions,
    TextSpan,
    TextSpans,
    listed_spans,
    position_list,
    span,
    wire_index,
    wire_spans,
)
from trocar._request.reductions import AXES, ROLES
from trocar._request.text_positions import TextPositions
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import reduction_pb2
from trocar_api.value_words import not_one_of

EditOrder = Literal["before", "after"]

EditTokens: TypeAlias = Positions | TextSpans | Literal["system", "user", "assistant"]
"""Which tokens of (batch, tokens, width) an edit changes."""

_ORDERS: dict[str, pb.EditOrder.ValueType] = {
    "before": pb.EDIT_ORDER_UNSPECIFIED,  # which means before
    "after": pb.EDIT_ORDER_AFTER_TAPS,
}

_USING_CHANNELS = frozenset(
    ("mean_ablate", "steer", "cap", "project_out", "project_onto", "top_k", "normalise")
)
"""The operations that look at the channels of the value."""


@dataclass(frozen=True)
class Edit:
    """One change to a value or a gradient while a model runs; made by `edit`."""

    message: pb.Edit
    """As it goes to the server."""
    tensors: tuple[WireTensor, ...] = ()
    """Arrays that go with it, in order: a mask, then the operation's own."""

    def __hash__(self) -> int:
        return hash(self.message.SerializeToString(deterministic=True))  # messages have no hash

    def __repr__(self) -> str:
        return edit_text(self.message)

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> "Edit":
        """Return the edit of a mapping, as read from JSON or TOML.

            Edit.from_json({"at": "layer3", "op": "scale", "factor": 0.0, "channels": [1, 2]})
            Edit.from_json({"at": "layer4", "op": "swap", "source": "clean", "index": ":, :8"})

        Args:
            mapping: `at`, the selector, `op`, the operation, and the operation's options by name; `channels`,
                `samples`, `tokens`, `index`, `mask`, `positions`, `order` and `channel_dim` as for `edit`.
                Positions are a number, a list or a text such as "2:8"; `tokens` also a span,
                {"text": "cat"}, {"characters": [4, 9]} or {"role": "user"}, or a list of these; `positions=`
                is a mapping with the arguments of `trocar.positions`; an index is a text such as ":, 3:8";
                arrays are lists. The option `at` of a swap is `from` here.

        Raises:
            TypeError: A key is unknown or missing, or a value is of the wrong type.
            ValueError: There is no such operation, or a value is out of range.
        """
        from trocar._request.edit_json import edit_from_mapping  # which makes edits with `edit`, below

        return edit_from_mapping(mapping)

    def to_wire(self) -> pb.Edit:
        """Return the edit as a message."""
        return self.message

    def payloads(self) -> list[memoryview]:
        """Return the bytes of its arrays, in order."""
        return [tensor.payload for tensor in self.tensors]


@explained
def edit(  # noqa: PLR0913 - one keyword for each thing that an edit can say
    selector: str,
    operation: EditOperation,
    /,
    *values: Any,
    channels: Positions | None = None,
    samples: Positions | None = None,
    tokens: EditTokens | None = None,
    index: IndexExpression | None = None,
    mask: ArrayLike | Numbers | None = None,
    positions: TextPositions | None = None,
    order: EditOrder = "before",
    channel_dim: int | None = None,
    **options: Any,
) -> Edit:
    """Declare a change of a value, a parameter or a gradient while a model runs.

        edit("layer3", "scale", 0.0, channels=[1, 2])       # two channels off
        edit("fc/in", "add", 1)                             # before the module runs
        edit("layer4", "swap", source="clean")              # activation patching, see `extract(sources=)`
        edit("relu@0/grad_out", "clamp", low=0)             # a gradient, in the backward pass
        edit("fc/param(weight)", "zero", index=np.s_[3])    # for this pass only

    The selected part x of the value becomes:

    - `set(value)`, `zero()`: a number or array; zeros.
    - `add(value)`, `scale(factor)`, `affine(scale=1, shift=0)`: x + value; x * factor; x * scale + shift.
    - `clamp(low=None, high=None)`: limited to a range; an omitted limit is not applied.
    - `noise(scale, kind="gaussian", seed=0)`: x + noise of this standard deviation; of kind "uniform", from
      -scale to scale.
    - `mean_ablate(reference=None)`: the mean over the batch; or the reference, one number per channel or an
      array.
    - `resample(seed=0)`: its samples in a random order.
    - `swap(source=None, at=None)`: the value of a pass on other inputs, or of this pass from an earlier
      place.
    - `add_input()`: output + input of the same call.
    - `steer(direction, alpha=1, keep_norm=False, units="raw", relative=False)`: x + alpha * direction along
      the channels; (channels,) or (batch, channels), or the name of a stored direction. With units="norm"
      alpha is in mean norms of the value at its place; relative: in norms of each vector itself.
    - `cap(direction, low=None, high=None, units="raw")`: the component along a direction limited to a range;
      the direction as for `steer`.
    - `project_out(basis)`, `project_onto(basis)`: x without, or only, its projection onto the span of the
      rows of (vectors, channels); `project_out` also of a stored direction, by name.
    - `top_k(k, dim=None, absolute=False)`: the k largest elements along a dimension, by default the channels;
      zeros elsewhere.
    - `dropout(probability, seed=0)`: random zeros, the rest scaled up.
    - `cast(dtype)`: rounded to "float16", "bfloat16" or "int8" and back.
    - `skip()`: the module's input; the module does not run.
    - `normalise(max_norm, scope="sample", exact=False)`: scaled down to a norm, of each "sample", of each
      "channel_vector" or of "all"; with `exact` also scaled up.
    - `nan_to_num(nan=0, posinf=None, neginf=None)`: x without NaN and infinities.

    Edits run in the order of their list. Random numbers come from torch's CPU generator with this seed.

    Args:
        selector: What to change: a value ("layer3", "fc/in"), a parameter for this pass only
            ("fc/param(weight)"), or a gradient ("layer3/grad_out", "fc/grad_in", "fc/param_grad(weight)").
        operation: Its name.
        *values: Its first options; they may also be given by name.
        channels: Only these channels; positions as for `trocar.channels`.
        samples: Only these samples of the batch.
        tokens: Only these tokens of (batch, tokens, width): positions; or a `trocar.span(...)` of the text, a
            list with one for each text, or a role of a chat, "system", "user" or "assistant". With spans the
            operation gets all tokens, and its result is used at the selected ones, as with a mask; not with
            `index`.
        index: Only this part, as `numpy.s_[...]` returns it; an integer drops its dimension before the
            operation.
        mask: Only where this bool array is true; it is broadcast to the value. Not with the four above.
        positions: Only at these positions of the texts, `trocar.positions(...)`; not with `tokens`, `index`
            or `mask`. In `generate` the operation gets the tokens at these positions alone, elsewhere all
            tokens, as with spans.
        order: "before": taps at the same place get the changed value; "after": the original.
        channel_dim: Which dimension holds the channels; negative counts from the end. By default the last
            of a tensor of rank 3, otherwise dimension 1, and of rank 1 dimension 0.
        **options: The operation's options by name. Numbers and arrays must be finite.

    Raises:
        TypeError: An option is unknown, missing or of the wrong type.
        ValueError: There is no such operation, a value is out of range, NaN or infinite, or an array has an
            impossible shape.
    """
    message, tensors = build_operation(operation, values, options)
    spans = _spans(tokens)
    places = None if spans else cast("Positions | None", tokens)
    takes = {"samples": samples, "channels": channels, "tokens": places}
    region, masks = _region(takes, spans, index, mask)
    if operation == "skip" and region is not None:
        raise ValueError(
            "skip applies to the whole call; leave channels=, samples=, tokens=, index= and mask= out"
        )
    if positions is not None and any(given is not None for given in (tokens, index, mask)):
        raise ValueError("an edit has positions= or other tokens; leave tokens=, index= and mask= out")
    uses_channels = operation in _USING_CHANNELS or channels is not None
    if channel_dim is not None and not uses_channels:
        raise ValueError(f"channel_dim is not used by {operation} without channels=")
    message.MergeFrom(
        pb.Edit(
            selector=text("the selector", selector),
            order=_ORDERS[one_of("order", order, _ORDERS)],
            region=region,
            positions=None if positions is None else positions.to_wire(),
            channel_dim=None if channel_dim is None else dimension("channel_dim", channel_dim),
        )
    )
    return Edit(message, (*masks, *tensors))


def _spans(tokens: object) -> list[TextSpan]:
    """Return the spans of `tokens=`; empty for positions."""
    if not isinstance(tokens, str):
        return listed_spans(tokens)
    if tokens not in ROLES:
        words = not_one_of(tokens, ROLES)
        raise ValueError(f"tokens {words}; words of the text are trocar.span({tokens!r})")
    return [span(role=tokens)]


def _region(
    takes: Mapping[str, Positions | None],
    spans: Sequence[TextSpan],
    index: IndexExpression | None,
    mask: ArrayLike | Numbers | None,
) -> tuple[pb.EditRegion | None, tuple[WireTensor, ...]]:
    """Return the part that is changed, None for all of it, and its mask."""
    chosen = {axis: positions for axis, positions in takes.items() if positions is not None}
    if mask is not None:
        if chosen or spans or index is not None:
            raise ValueError(
                "an edit has a mask or positions (channels=, samples=, tokens=, index=), not both"
            )
        sent = mask_tensor(mask)
        return pb.EditRegion(mask=spec(sent)), (sent,)
    if spans and index is not None:
        raise ValueError("an edit has tokens of a text or an index, not both; use channels= and samples=")
    if not chosen and not spans and index is None:
        return None, ()
    messages = [
        reduction_pb2.TakeReduction(axis=AXES[axis], positions=position_list(axis, positions))
        for axis, positions in chosen.items()
    ]
    region = pb.EditRegion(
        index=None if index is None else wire_index(index),
        takes=messages,
        spans=wire_spans(spans) if spans else None,
    )
    return region, ()


Edits: TypeAlias = str | Edit | Sequence[str | Edit]
"""Edits of a pass, in order: of `edit`, or names of stored ones."""
