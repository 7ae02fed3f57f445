"""Attention of a module: the ports `pattern`, `logits` and `sink`, resolved to the function that computes it.

    layers.3.self_attn/pattern  # -> fn:scaled_dot_product_attention@3/scores

The function sees query, key, mask and scale as they enter it: heads in groups are repeated, causal, sliding
and padding masks, relative positions and soft-caps are in. The model computes as without a tap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.function_layouts import ATTENTION
from trocar_server.surgery.recording.recording import (
    Leaf,
    ModuleCall,
    ModuleRecord,
    Recording,
    structure_of,
)
from trocar_server.surgery.resolution.call_records import Records, modules_of
from trocar_server.surgery.resolution.values import Value, values_of
from trocar_server.surgery.selectors.selectors import LOGITS, SINK, Selector
from trocar_server.surgery.sessions.attention import SOFTMAX
from trocar_server.surgery.sessions.functions import SCORES
from trocar_server.surgery.sessions.taps import Target

_LEAST_RANK = 3
"""Dimensions of the logits of attention: (..., queries, keys)."""

Place = tuple[str, int]
"""A module's path, or a function's name, and the index of a call of it."""


@dataclass(frozen=True)
class _Attention:
    """One computation of attention: a call of a function, and the port and shape of its value.

    Attributes:
        place: The call.
        at: When it computes, on the clock of modules.
        leaf: The value.
        columns: Start and stop of the wanted part of its last dimension; None for all of it.
        is_along_last: Whether its last dimension sums to 1, as that of keys does.
    """

    place: Place
    at: int
    leaf: Leaf
    columns: tuple[int | None, int | None] | None = None
    is_along_last: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the wanted part."""
        shape = self.leaf.shape or ()
        if self.columns is None or not shape:
            return shape
        return (*shape[:-1], len(range(shape[-1])[slice(*self.columns)]))


def attention_of(selector: Selector, recording: Recording) -> list[Value]:
    """Return the attention that the selected modules compute, in execution order.

    Of a pattern's modules inside one another, the innermost is taken.

    Raises:
        ServiceError: `UNKNOWN_PICK`, the module computes no attention that can be seen; `AMBIGUOUS_CALL`, it
            computes several; a selector's other errors.
    """
    records = modules_of(recording)
    held = _held(selector, records, recording.attention or {})
    attentions = {place: result[0] for place, result in held.items()}
    ported = dict(records.by_path)
    for path in {path for path, _ in attentions}:
        calls = enumerate(ported[path].calls)
        with_port = [_with_port(call, attentions.get((path, i)), selector.port) for i, call in calls]
        ported[path] = replace(ported[path], calls=with_port)
    values = values_of(selector, replace(records, by_path=ported))
    return [
        _of_function(target, attentions[target.path, target.call], recording.modules) for target, _ in values
    ]


def _held(
    selector: Selector, records: Records, functions: Mapping[str, ModuleRecord]
) -> dict[Place, list[_Attention]]:
    """Return the attention inside each call of the matching modules."""
    computed = list(_computed(functions, selector.port))
    matched = records.matching(selector)
    calls = {(record.path, i): call for record in matched for i, call in enumerate(record.calls)}
    held = {place: _inside(call, computed) for place, call in calls.items()}
    if selector.is_pattern:
        innermost = {entry.place: place for place, result in _outer_first(held, calls) for entry in result}
        chosen = set(innermost.values())
        held = {place: result for place, result in held.items() if place in chosen and len(result) == 1}
    several = next((place for place, result in held.items() if len(result) > 1), None)
    if several is not None:
        raise _ambiguous(selector, len(held[several]))
    held = {place: result for place, result in held.items() if result}
    if calls and not held:
        raise _no_attention(selector)
    return held


def _outer_first(
    held: Mapping[Place, list[_Attention]], calls: Mapping[Place, ModuleCall]
) -> list[tuple[Place, list[_Attention]]]:
    return sorted(held.items(), key=lambda item: calls[item[0]].started)


def _computed(functions: Mapping[str, ModuleRecord], port: str) -> Iterator[_Attention]:
    """Yield what a pass computes as attention: fused attention, and softmax over three dimensions or more."""
    for index, call in enumerate(_calls(functions, ATTENTION) if port != SINK else ()):
        leaf = next(leaf for leaf in call.outputs if leaf.port == (LOGITS if port == LOGITS else SCORES))
        yield _Attention((ATTENTION, index), call.after_module, leaf)
    for index, call in enumerate(_calls(functions, SOFTMAX)):
        result = _softmaxed(functions, port, index, call)
        if result is not None and result.leaf.shape is not None and len(result.leaf.shape) >= _LEAST_RANK:
            yield result


def _softmaxed(
    functions: Mapping[str, ModuleRecord], port: str, index: int, call: ModuleCall
) -> _Attention | None:
    """Return what a softmax computes as attention, without the columns of a sink; None for nothing."""
    sink = call.sink
    if port == SINK and sink is None:
        return None
    if port == LOGITS and sink is not None and sink.logits is not None:
        name, own, at, picks = sink.logits
        leaves = functions[name].calls[own].inputs
        leaf = next(leaf for leaf in leaves if (leaf.port, leaf.picks) == (at, picks))
        return _Attention((name, own), call.after_module, leaf)
    leaves = call.inputs if port == LOGITS else call.outputs
    result = next((leaf for leaf in leaves if leaf.shape is not None), None)
    columns = None if sink is None else sink.own if port == SINK else sink.keys
    if result is None:
        return None
    return _Attention((SOFTMAX, index), call.after_module, result, columns, call.is_along_last)


def _calls(functions: Mapping[str, ModuleRecord], name: str) -> Sequence[ModuleCall]:
    return functions[name].calls if name in functions else ()


def _inside(call: ModuleCall, computed: Sequence[_Attention]) -> list[_Attention]:
    result = [entry for entry in computed if call.started <= entry.at < call.ended]
    fused = [entry for entry in result if entry.place[0] == ATTENTION]
    along_last = [entry for entry in result if entry.is_along_last]  # other softmaxes weigh something else
    return fused or along_last or result


def _with_port(call: ModuleCall, attention: _Attention | None, port: str) -> ModuleCall:
    if attention is None:
        return call
    value = replace(attention.leaf, port=port, picks=(), shape=attention.shape)
    return replace(call, outputs=[*call.outputs, value])


def _of_function(target: Target, attention: _Attention, modules: Mapping[str, ModuleRecord]) -> Value:
    """Return the function's value under the module's name."""
    (path, index), leaf = attention.place, attention.leaf
    view = _unpacked(attention, modules) if path == ATTENTION else ()
    own = replace(
        target,
        path=path,
        call=index,
        port=leaf.port,
        picks=leaf.picks,
        kind="fn",
        shape=leaf.shape,
        view=view,
        columns=attention.columns,
    )
    return own, replace(leaf, shape=view or attention.shape)


# Note: [Packed heads]
# Of a single token and heads in groups with a mask, transformers 5.23 calls torch's attention with the heads
# of a group in the place of the queries, (batch, groups, heads of a group, width): it spares copies of keys.
def _unpacked(attention: _Attention, modules: Mapping[str, ModuleRecord]) -> tuple[int, ...]:
    """Return the shape (batch, heads, 1, keys) of attention with packed heads; empty for others."""
    shape = attention.leaf.shape or ()
    if len(shape) != 4 or shape[2] == 1 or not _is_of_one_token(_caller(attention.at, modules), shape[0]):
        return ()
    return (shape[0], shape[1] * shape[2], 1, shape[3])


def _caller(at: int, modules: Mapping[str, ModuleRecord]) -> ModuleCall:
    """Return the innermost call of a module around a step of the pass."""
    calls = (
        (call.started, path, index)
        for path, record in structure_of(modules).items()
        for index, call in enumerate(record.calls)
        if call.started <= at < call.ended
    )
    _, path, index = max(calls)
    return modules[path].calls[index]


def _is_of_one_token(call: ModuleCall, batch: int) -> bool:
    """Whether a module takes and returns (batch, 1, width).

    With the batch, as attention may take (tokens, batch, width): `nn.MultiheadAttention` does by default.
    """
    ports = (call.inputs, call.outputs)
    of_ports = ([leaf.shape for leaf in leaves if leaf.shape and len(leaf.shape) == 3] for leaves in ports)
    firsts = [shapes[0] for shapes in of_ports if shapes]
    return bool(firsts) and all(shape[:2] == (batch, 1) for shape in firsts)


def _ambiguous(selector: Selector, count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.AMBIGUOUS_CALL,
        f"'{selector.text}': {count} attentions are computed inside one call; name the module of one of them",
        selector=selector.text,
        call_count=str(count),
    )


def _no_attention(selector: Selector) -> ServiceError:
    problem = (
        "no attention with a sink is computed there: no softmax over (..., queries, keys) with columns that "
        "the model drops after it"
        if selector.port == SINK
        else "no attention that can be seen is computed there: neither torch's scaled_dot_product_attention "
        "nor a softmax over (..., queries, keys)"
    )
    return ServiceError(
        ErrorReason.UNKNOWN_PICK,
        f"'{selector.text}': {problem}",
        selector=selector.text,
    )
