"""Predicted recordings of a model: for sizes that no pass was recorded on.

A model that is recorded on a second signature of one kind gets a symbolic recording for that kind, which
predicts the recordings of further sizes. See Note: [Symbolic recording], and Note: [Masks without data] for
models that are recorded on data.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trocar_server.engine.host.recordings import ModelRecorder, made_arguments
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.models import make_meta_replica
from trocar_server.nested_names import is_nested
from trocar_server.surgery import PassAborted, PassGuard, Recording, attention_in, record_functions
from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.recording.symbolic import (
    RecordFunctions,
    Shapes,
    SymbolicRecording,
    record_symbolic,
)

_ATTEMPTS = (2, 4, 16, 64)
"""Recordings of one kind of signature after which a symbolic one is tried: a model may have several paths."""
_ATTEMPTS_ON_DATA = 2
"""Failed symbolic recordings of a model that reads its data, for example a detector, before none is tried."""
_KINDS_KEPT = 32
_LIMIT_S = 5.0
"""The most time of a symbolic recording: other passes wait for it."""
_CHANGES: tuple[Callable[[int], int], ...] = (lambda size: 2 * size + 1, lambda size: size + 1)
_CHANGES_OF_DATA: tuple[Callable[[int], int], ...] = (
    lambda size: size // 2 if size > 4 else size + 1,
    lambda size: size - 1 if size > 2 else size + 2,
)
"""Where neighbours are real passes: most are smaller, so cheaper, than the pass that was just recorded."""

_PREDICTED = frozenset({"attention"})
"""What is predicted beside modules."""

SignatureKind = tuple[object, ...]


@dataclass
class Predictions:
    """Predicts recordings of one model.

    Attributes:
        recorder: Records its meta passes.
        attempt_count: Symbolic recordings that were tried.
        symbolic: Symbolic recordings by kind of signature; not to be changed.
    """

    recorder: ModelRecorder
    attempt_count: int = 0
    symbolic: dict[SignatureKind, tuple[SymbolicRecording, ...]] = field(default_factory=dict)
    _recorded: Counter[tuple[SignatureKind, frozenset[str]]] = field(default_factory=Counter)
    _failed_on_data: int = 0

    def find(self, signature: Signature, kinds: frozenset[str] = frozenset()) -> Recording | None:
        """Return the predicted recording of a signature; None where none is certain.

        Args:
            signature: Of the inputs.
            kinds: What the recording must have beside modules.
        """
        known = self.symbolic.get(kind_of(signature), ()) if self.symbolic else ()
        if not known:
            return None
        shapes = _shapes(self._in_call_order(signature))
        result = (symbolic.recording(shapes) for symbolic in known if kinds <= symbolic.template.kinds)
        return next((recording for recording in result if recording is not None), None)

    def has(self, signature: Signature) -> bool:
        """Whether recordings of such signatures are predicted."""
        return bool(self.symbolic) and kind_of(signature) in self.symbolic

    def note(self, signature: Signature, recording: Recording) -> bool:
        """Count a recorded pass. Owner thread only.

        Returns:
            Whether it is time for `extend`.
        """
        kind = (kind_of(signature), recording.kinds & _PREDICTED)
        if kind not in self._recorded and len(self._recorded) >= _KINDS_KEPT:
            return False
        if not recording.is_symbolic and self._failed_on_data >= _ATTEMPTS_ON_DATA:
            return False
        self._recorded[kind] += 1
        return self._recorded[kind] in _ATTEMPTS

    def extend(self, signature: Signature, recording: Recording, max_bytes: int) -> None:
        """Make a symbolic recording of the path that a signature takes. Owner thread only; takes seconds.

        It is kept if it predicts this recording and those of two neighbours; without attention if that fails.

        Args:
            signature: Of a recorded pass.
            recording: Its recording, with the model's stages.
            max_bytes: The most memory that a pass on data may use.
        """
        kinds = recording.kinds & _PREDICTED
        if self.find(signature, kinds) is not None:
            return
        self.attempt_count += 1
        wanted = [recording]
        if kinds and self.find(signature) is None:
            wanted.append(replace(recording, functions=None, attention=None))
        if not any(self._extended(signature, one, max_bytes) for one in wanted):
            self._failed_on_data += not recording.is_symbolic

    def _extended(self, signature: Signature, recording: Recording, max_bytes: int) -> bool:
        """Keep a symbolic recording if it is right; return whether it is."""
        with suppress(Exception, PassAborted):  # anything, or too slow: passes are then recorded as before
            ordered = self._in_call_order(signature)
            symbolic = self._recorded_symbolically(ordered, recording)
            if self._is_right(symbolic, ordered, recording, max_bytes):
                named = replace(symbolic, template=replace(symbolic.template, stages=recording.stages))
                kind = kind_of(signature)
                self.symbolic = {**self.symbolic, kind: (named, *self.symbolic.get(kind, ()))}
                return True
        return False

    def drop(self, signature: Signature) -> None:
        """Stop predicting signatures of one kind: a pass differed from its prediction."""
        kind = kind_of(signature)
        self.symbolic = {known: result for known, result in self.symbolic.items() if known != kind}
        self._recorded.update({(kind, some): _ATTEMPTS[-1] for some in (frozenset[str](), _PREDICTED)})

    def _in_call_order(self, signature: Signature) -> Signature:
        """Return the entries in the order of the call: those passed by position first."""
        names = [entry.name for entry in signature]
        if any(map(is_nested, names)):
            return signature
        positional, keyword = self.recorder.hosted.forward.called(names, signature)
        return (*positional, *keyword.values())

    def _recorded_symbolically(self, signature: Signature, recording: Recording) -> SymbolicRecording:
        hosted, on_data = self.recorder.hosted, None if recording.is_symbolic else recording
        device = "meta" if on_data is None else hosted.device
        module = hosted.pristine.apart() if on_data else make_meta_replica(hosted.module)
        with PassGuard(time.monotonic() + _LIMIT_S).watching(module):
            return record_symbolic(
                module,
                *made_arguments(hosted, signature, device, 1),
                on_data=on_data,
                record_attention=_attention(on_data is None) if recording.attention is not None else None,
            )

    def _is_right(
        self, symbolic: SymbolicRecording, signature: Signature, recording: Recording, max_bytes: int
    ) -> bool:
        if not _is_same(symbolic.recording(_shapes(signature)), recording):
            return False
        changes = _CHANGES if recording.is_symbolic else _CHANGES_OF_DATA
        neighbours = list(_neighbours(symbolic, signature, changes))
        for near in neighbours:
            recorded = self._recorded_near(near, recording, max_bytes)
            if not _is_same(symbolic.recording(_shapes(near)), recorded):
                return False
        return bool(neighbours)

    def _recorded_near(self, near: Signature, recording: Recording, max_bytes: int) -> Recording:
        kinds = recording.kinds & _PREDICTED
        if recording.is_symbolic:
            return self.recorder.record(near, kinds, PassGuard())
        return self.recorder.record_made(near, kinds, PassGuard(time.monotonic() + _LIMIT_S), max_bytes)


def _is_same(predicted: Recording | None, recorded: Recording) -> bool:
    """Whether a prediction equals a recorded pass: order, calls, shapes, strides, writes and bytes.

    Of a pass on data the bytes may be fewer: its mask masks nothing.
    """
    if predicted is None or predicted.is_symbolic != recorded.is_symbolic:
        return False
    if not _has_same_attention(predicted, recorded):
        return False
    if recorded.is_symbolic:
        is_equal = list(predicted.modules.items()) == list(recorded.modules.items())
        is_equal = is_equal and predicted.work == recorded.work
        return is_equal and predicted.peak_bytes == recorded.peak_bytes
    return predicted.peak_bytes >= recorded.peak_bytes and (
        list(_without_peaks(predicted)) == list(_without_peaks(recorded))
    )


def _without_peaks(recording: Recording) -> Iterator[ModuleRecord]:
    for record in recording.modules.values():
        calls = [
            replace(call, peak_bytes_before=0, peak_bytes=0, work_before=0, work=0) for call in record.calls
        ]
        yield replace(record, calls=calls)


def _has_same_attention(predicted: Recording, recorded: Recording) -> bool:
    """Whether attention is computed by the same calls; their steps among other functions don't matter."""

    def records_of(recording: Recording) -> list[ModuleRecord]:
        result = recording.attention if "attention" in predicted.kinds else None
        return [
            replace(record, calls=[replace(call, started=0, ended=0) for call in record.calls])
            for record in (result or {}).values()
        ]

    return records_of(predicted) == records_of(recorded)


def _attention(is_symbolic: bool) -> RecordFunctions:
    return lambda module, args, kwargs: attention_in(
        record_functions(module, args, kwargs, is_symbolic=is_symbolic)
    )


def _neighbours(
    symbolic: SymbolicRecording, signature: Signature, changes: Sequence[Callable[[int], int]]
) -> Iterator[Signature]:
    """Yield signatures of the same path with other sizes, each of which varies where it may."""
    for change in changes:
        near = _moved(symbolic, signature, change)
        if near != signature:
            yield near


def _moved(symbolic: SymbolicRecording, signature: Signature, change: Callable[[int], int]) -> Signature:
    """Change each size as far as the path stays the same."""
    near = signature
    sizes = [size for shape in _shapes(signature) for size in shape]

    def equal_to(wanted: int) -> Callable[[int, int], int]:
        return lambda _, size: change(size) if size == wanted else size

    def only_at(wanted: int) -> Callable[[int, int], int]:
        return lambda position, size: change(size) if position == wanted else size

    for size in dict.fromkeys(sizes):  # some have to be equal, as tokens and their mask: they change together
        changed = _resized(near, equal_to(size))
        near = changed if symbolic.holds(_shapes(changed)) else near
    for position in range(len(sizes)) if near == signature else ():
        changed = _resized(near, only_at(position))
        near = changed if symbolic.holds(_shapes(changed)) else near
    return near


def _resized(signature: Signature, resize: Callable[[int, int], int]) -> Signature:
    """Return a signature with other sizes, from their position among all sizes and the old size."""
    position = iter(range(sum(len(shape) for entry in signature for shape in entry.shapes)))

    def resized(entry: TensorSignature) -> TensorSignature:
        shapes = tuple(tuple(resize(next(position), size) for size in shape) for shape in entry.shapes)
        return replace(entry, shapes=shapes)

    return tuple(resized(entry) for entry in signature)


def kind_of(signature: Signature) -> SignatureKind:
    """Return what symbolic sizes don't cover: names, dtypes, flags, ranks, and which sizes are 0 or 1."""
    return tuple(
        (
            entry.name,
            entry.dtype,
            entry.is_list,
            entry.flag,
            *(tuple(min(size, 2) for size in s) for s in entry.shapes),
        )
        for entry in signature
    )


def _shapes(signature: Signature) -> Shapes:
    return [shape for entry in signature for shape in entry.shapes]
