"""Layouts of a deployment's passes: what each dimension of each value means, for each kind of inputs.

# Note: [Passes with tags]
A layout does not depend on sizes, so it is made once for all inputs of the same names, dtypes and ranks, by
passes of sizes of its own: three samples, as a dimension of one element has no digits, and as long texts as
the example's. The second pass has more samples and longer texts, as its check. Neither has the caller's
data. A model that has no such pass has no layouts, nor one that reads its data where such a pass would be too
large.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from trocar_server.engine.execute.arguments import signature_of_batch
from trocar_server.engine.host.predictions import SignatureKind, kind_of
from trocar_server.engine.host.recordings import (
    DataNeededError,
    ModelRecorder,
    example_dtype,
    fill,
    lacks_data,
)
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.engine.schedule.lease import Replica
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, make_replica
from trocar_server.models.inputs import BATCH, IMAGE_BATCH, TOKEN_IDS, InputSignature, InputSpec
from trocar_server.surgery import PassGuard, Recording
from trocar_server.surgery.axes.axis import Axis, Dims, Kind, whole
from trocar_server.surgery.axes.layout import NO_LAYOUTS, Layouts
from trocar_server.surgery.recording.layout_check import checked
from trocar_server.surgery.recording.layout_walk import Walk, Watching, walk
from trocar_server.surgery.sessions.function_calls import FunctionWatch
from trocar_server.surgery.structure import leaves
from trocar_server.tensors.reductions.padding import MASKS

_SAMPLES = (3, 5)
"""In the first pass and in the second."""
_KEPT_SIZES = ("height", "width", "frames", "samples", "patches")
"""Axes of inputs that keep the request's size: others need not fit the model's windows and strides."""
_SEVERAL = 4
"""Elements of a dimension without a name of which the request has one, where the model takes that."""
_KINDS_KEPT = 64
"""Of one model; the oldest is forgotten for another one, and made again when it is asked for."""

CheckMade = Callable[[Signature, PassGuard], None]
"""Refuses a pass on made data that would need too much memory or time; raises `ServiceError`."""


@dataclass
class ModelLayouts:
    """The layouts of a model's passes, by kind of inputs. Owner thread only, but `find`.

    Attributes:
        recorder: Records its passes.
        check_made: Checks passes on made data; None allows none.
    """

    recorder: ModelRecorder
    check_made: CheckMade | None = None
    _known: dict[SignatureKind, Layouts] = field(default_factory=dict)
    _of_functions: set[SignatureKind] = field(default_factory=set)

    def find(self, signature: Signature) -> Layouts | None:
        """Return the layouts for inputs of a signature; None where they were not made yet."""
        return self._known.get(kind_of(signature))

    def make(self, signature: Signature, guard: PassGuard, *, with_functions: bool = False) -> Layouts:
        """Return the layouts for inputs of a signature; see Note: [Passes with tags].

        Args:
            signature: Of the inputs.
            guard: Aborts the passes.
            with_functions: Whether those of values of functions are wanted, too.

        Raises:
            PassAborted: The guard aborted a pass.
        """
        known, kind = self.find(signature), kind_of(signature)
        if known is None or (with_functions and kind not in self._of_functions):
            known = NO_LAYOUTS
            with suppress(DataNeededError):
                known = self._made(signature, guard, FunctionWatch if with_functions else None)
            kept = [entry for entry in self._known.items() if entry[0] != kind][1 - _KINDS_KEPT :]
            self._known = {**dict(kept), kind: known}
            self._of_functions = {
                *self._of_functions,
                *([kind] if with_functions else []),
            } & self._known.keys()
        return known

    def _made(self, signature: Signature, guard: PassGuard, watching: Watching | None) -> Layouts:
        for has_own_sizes in (False, True):
            inputs = TaggedInputs(self.recorder.hosted, signature, has_own_sizes=has_own_sizes)
            passes = _Passes(self.recorder, inputs, guard, self.check_made, watching)
            first = passes.walk(_SAMPLES[0], {})
            if first is not None:
                return passes.checked(first)
        return NO_LAYOUTS


def example_layouts(recorder: ModelRecorder, example: Recording) -> Layouts:
    """Return the layouts for inputs as the model's example, for a model without a deployment."""
    signature = signature_of_batch(recorder.hosted, recorder.hosted.example_batch, example_dtype(example))
    return ModelLayouts(recorder, check_made=_any_made).make(signature, PassGuard())


def _any_made(signature: Signature, guard: PassGuard) -> None:
    """Allow a pass of a few samples as the example on made data: who trains the model passes more."""


class _Passes:
    """Passes with tags on inputs of one kind."""

    def __init__(
        self,
        recorder: ModelRecorder,
        inputs: "TaggedInputs",
        guard: PassGuard,
        check_made: CheckMade | None,
        watching: Watching | None,
    ) -> None:
        self._recorder, self._inputs, self._watching = recorder, inputs, watching
        self._guard, self._check_made = guard, check_made

    def walk(self, samples: int, sizes: Mapping[str, int]) -> Walk | None:
        """Run one, on the meta device if possible; None where the model refuses such inputs.

        Raises:
            DataNeededError: The model reads its data, and no pass on data may run.
        """
        if self._recorder.meta is not None:
            try:
                return self._run(make_replica(self._recorder.meta), samples, sizes, "meta")
            except Exception as error:  # noqa: BLE001 - a model may raise anything
                if not lacks_data(error):
                    return None
        return self._walk_on_data(samples, sizes)

    def checked(self, first: Walk) -> Layouts:
        """Return the layouts of a pass, checked by a second one, where the model has such a pass."""
        inputs, longer = self._inputs, self._inputs.longer_sizes
        for sizes in [longer, {}] if longer else [{}]:
            second = self.walk(_SAMPLES[1], sizes)
            if second is not None:
                moved = {name: (size, sizes.get(name, size)) for name, size in inputs.sizes.items()}
                return checked(first, second, {**moved, first.first_axis: _SAMPLES})
        return first.layouts

    def _walk_on_data(self, samples: int, sizes: Mapping[str, int]) -> Walk | None:
        hosted = self._recorder.hosted
        if self._check_made is None or hosted.takes_list:  # of a list no dimension is known anyway
            raise DataNeededError
        try:
            self._check_made(self._inputs.signature(samples, sizes), self._guard)
        except ServiceError:
            raise DataNeededError from None
        with suppress(Exception):
            replica = Replica(hosted.pristine, module=hosted.pristine.apart())
            return replica.run(lambda module: self._run(module, samples, sizes, hosted.device))
        return None

    def _run(
        self, module: nn.Module, samples: int, sizes: Mapping[str, int], device: torch.device | str
    ) -> Walk:
        names, values, dims = self._inputs.make(samples, sizes, device)
        called = self._recorder.hosted.forward.called(names, values)
        with self._guard.watching(module):
            named = dict(zip(names, values, strict=True))
            return walk(module, called, named, dims, self._inputs.masks, self._watching)


class TaggedInputs:
    """Inputs of a kind, and what their dimensions are.

    Args:
        hosted: The model.
        signature: Of inputs of this kind.
        has_own_sizes: Whether they have the signature's sizes, but for the samples; else the example's.

    Attributes:
        sizes: The size of each axis of the inputs that has a name.
        masks: The argument that masks an axis of the inputs, by the axis's name, whether it is given or not.
    """

    def __init__(self, hosted: HostedModel, signature: Signature, *, has_own_sizes: bool) -> None:
        self._has_own_sizes = has_own_sizes
        self._hosted, self._entries = hosted, signature
        self._names = [_declared(hosted.signature, entry, place) for place, entry in enumerate(signature)]
        self._batch = next((entry.shapes[0][0] for entry in signature if entry.shapes and entry.shapes[0]), 1)
        self.masks = {
            str(spec.shape[1]): spec.name
            for spec in hosted.signature.inputs
            if spec.name in MASKS and spec.shape is not None and len(spec.shape) == 2
        }
        self.sizes: dict[str, int] = {}
        for entry, names in zip(signature, self._names, strict=True):
            if names is not None:
                example = hosted.signature.shape_of(InputSpec(entry.name, "", names), _SAMPLES[0])
                self._note_sizes(names, example, entry.shapes[0])

    def _note_sizes(self, names: Sequence[int | str], example: Sequence[int], given: Sequence[int]) -> None:
        for name, size, own in zip(names, example, given, strict=True):
            if isinstance(name, str) and name not in _BATCHES:
                self.sizes[name] = max(own if self._has_own_sizes or name in _KEPT_SIZES else size, 2)

    @property
    def longer_sizes(self) -> dict[str, int]:
        """Another size for each axis that may have one, each longer by another number."""
        largest = self._hosted.signature.largest
        longer = {
            name: size + number
            for number, (name, size) in enumerate(self.sizes.items(), start=1)
            if name not in _KEPT_SIZES
        }
        return {name: size for name, size in longer.items() if size <= largest.get(name, size)}

    def signature(self, samples: int, sizes: Mapping[str, int]) -> Signature:
        """Return the signature of what `make` makes."""
        known = {**self.sizes, **sizes}
        return tuple(
            replace(entry, shapes=tuple(self._shape(shape, names, samples, known) for shape in entry.shapes))
            for entry, names in zip(self._entries, self._names, strict=True)
        )

    def make(
        self, samples: int, sizes: Mapping[str, int], device: torch.device | str
    ) -> tuple[Sequence[str], Sequence[Any], list[tuple[torch.Tensor, Dims]]]:
        """Return names and values of arguments, and the dimensions of their tensors.

        Args:
            samples: Their number.
            sizes: Those of axes that are not as in `sizes`.
            device: `meta`, or that of the model.
        """
        axes: dict[str, Axis] = {}
        example = self._example(samples, {**self.sizes, **sizes}) if str(device) != "meta" else {}
        values, dims = [], []
        for entry, names in zip(self.signature(samples, sizes), self._names, strict=True):
            value: Any = example.get(entry.name)
            if value is None or tuple(value.shape) != entry.shapes[0] or value.dtype != entry.dtype:
                value = fill(entry, device, 1)
            value = value.to(device) if isinstance(value, torch.Tensor) else value
            values.append(value)
            for _, tensor in leaves(value):
                if isinstance(tensor, torch.Tensor):
                    dims.append((tensor, tuple(self._dims(tensor.shape, names, axes))))
        return [entry.name for entry in self._entries], values, dims

    def _example(self, samples: int, sizes: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        known = self._hosted.known_signature
        if known is None:
            return {}
        return replace(known, sizes={**known.sizes, **sizes}).example(samples, self._hosted.dtype)

    def _shape(
        self, shape: tuple[int, ...], names: "Names | None", samples: int, sizes: Mapping[str, int]
    ) -> tuple[int, ...]:
        if names is not None:
            return tuple(
                size if isinstance(name, int) else samples if name in _BATCHES else sizes[name]
                for name, size in zip(names, shape, strict=True)
            )
        if not self._has_own_sizes:
            shape = tuple(_SEVERAL if size == 1 and place else size for place, size in enumerate(shape))
        is_of_samples = shape[:1] == (self._batch,) and not self._hosted.takes_list
        return (samples, *shape[1:]) if is_of_samples else shape

    def _dims(
        self, shape: Sequence[int], names: "Names | None", axes: dict[str, Axis]
    ) -> Iterable[tuple[Any, ...]]:
        """Yield what each dimension is: of the only one without a name beside named ones the channels."""
        is_only = names is not None and sum(isinstance(name, int) for name in names) == 1
        if names is None:
            first: Names = () if self._hosted.takes_list else (BATCH,)
            names = (*first, *shape[len(first) :])
        for name, size in zip(names, shape, strict=False):
            if isinstance(name, str):
                kind = Kind.BATCH if name in _BATCHES else Kind.NAMED
                yield whole(axes.setdefault(name, Axis(kind, size, "" if name == BATCH else name)))
            else:
                yield whole(Axis(Kind.CHANNELS if is_only else Kind.UNKNOWN, size))


_BATCHES = (BATCH, IMAGE_BATCH)

Names: TypeAlias = tuple[int | str, ...]
"""The dimensions of an input as a signature has them: a name, or a number where it has no name."""


def _declared(signature: InputSignature, entry: TensorSignature, place: int) -> Names | None:
    """Return the dimensions of an input; None for one within a structure, and where they are not told.

    A mask whose dimensions are not told has those that its token ids have.
    """
    if not signature.is_complete or entry.flag is not None:
        return None
    spec = signature.find(entry.name, place)
    if entry.name not in ("", spec.name):
        return None
    names = spec.shape
    if names is None and spec.name in MASKS:
        ids = spec.name.replace("attention_mask", TOKEN_IDS)
        names = next((one.shape for one in signature.inputs if one.name == ids), None)
    return names if names is not None and len(names) == len(entry.shapes[0]) else None
