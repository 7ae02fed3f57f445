"""Recordings of a deployment's passes: on the meta device, or on synthetic data where the model reads it.

# Note: [Data-dependent control flow]
`mask.all()`, `mask.sum().item()` and `torch.nonzero(mask)` in a forward have no answer on the meta device,
and whether a pass reaches them depends on the arguments: most models of transformers read a mask and nothing
else. So each signature is tried on the meta device first, and then on synthetic data: random floats, and
integers that are one (a mask that masks nothing, a token of every vocabulary), then zero. A recording of a
caller's own data is never shared with others: the number of a loop's iterations may reveal the data.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import copied_arguments
from trocar_server.engine.host.rejections import rejection
from trocar_server.engine.request.plan import Flag, Signature, TensorSignature
from trocar_server.engine.schedule.lease import Replica
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, make_meta_replica, make_replica
from trocar_server.surgery import (
    PassGuard,
    Recording,
    attention_in,
    record_calls,
    record_functions,
    record_nodes,
)
from trocar_server.surgery.recording.graph import TracedGraph, trace_graph
from trocar_server.surgery.recording.liveness import LiveBytes

Called = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of a forward."""

_WHOLE_NUMBERS = (1, 0)
"""Values of integers and booleans in synthetic data, in the order in which they are tried."""


class DataNeededError(Exception):
    """The pass reads its data, so it cannot run on the meta device."""


class MadeDataRefusedError(ServiceError):
    """The model refuses synthetic data; it may accept the caller's own."""


@dataclass
class ModelRecorder:
    """Records passes of one model. Owner thread only.

    Attributes:
        hosted: The model.
        meta: Its tree on the meta device, or None where it has no meta pass. Passes run on copies of it,
            so that none finds what another has kept there.
    """

    hosted: HostedModel
    meta: nn.Module | None
    _traced: TracedGraph | None = None

    def record(
        self,
        signature: Signature,
        kinds: Collection[str],
        guard: PassGuard,
        check: Callable[[Recording], None] | None = None,
    ) -> Recording:
        """Record a meta pass, and the nodes (`fx`) and functions (`fn`) requested, or attention alone.

        See `record_calls` for `check`.

        Raises:
            DataNeededError: The model reads its data. See Note: [Data-dependent control flow].
            ServiceError: `NOT_TRACEABLE`, nodes are requested and there are none.
            Exception: The model's error on such inputs.
        """
        if self.meta is None:
            raise DataNeededError
        called = made_arguments(self.hosted, signature, "meta", 0)
        module = make_replica(self.meta)
        try:
            with guard.watching(module):
                recording = record_calls(module, *called, check=check)
                self.hosted.pristine.note(recording.written)
                return self._with_kinds(recording, kinds, module, called, guard)
        except ServiceError:
            raise
        except Exception as error:
            if lacks_data(error):
                raise DataNeededError from error
            raise

    def record_made(
        self, signature: Signature, kinds: Collection[str], guard: PassGuard, max_bytes: int
    ) -> Recording:
        """Record a pass on synthetic data of a signature.

        Args:
            signature: Of the inputs.
            kinds: Kinds to record beside modules.
            guard: Aborts the pass.
            max_bytes: The most memory that the pass may use.

        Raises:
            ServiceError: `PASS_TOO_LARGE`.
            Exception: The model's error on the first data tried.
        """
        first: Exception | None = None
        dtypes = [entry.dtype for entry in signature]
        has_whole = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)
        for number in _WHOLE_NUMBERS if has_whole else (0,):
            try:
                called = made_arguments(self.hosted, signature, self.hosted.device, number)
                return self.record_data(called, kinds, guard, max_bytes)
            except (ServiceError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - a model may raise anything
                first = first or error
        assert first is not None
        raise first

    def record_data(
        self, called: Called, kinds: Collection[str], guard: PassGuard, max_bytes: int
    ) -> Recording:
        """Record a pass on copies of data, for data-dependent control flow.

        Raises:
            ServiceError: `PASS_TOO_LARGE`.
        """
        replica = Replica(self.hosted.pristine, module=self.hosted.pristine.apart())

        def record(module: nn.Module) -> Recording:
            with guard.watching(module):
                live = LiveBytes(max_bytes)
                recording = record_calls(module, *copied_arguments(called), is_symbolic=False, live=live)
                return self._with_kinds(recording, kinds, module, called, guard)

        return replica.run(record)

    def graph(self) -> TracedGraph:
        """Return the model's traced graph, made when it is first needed.

        Raises:
            ServiceError: `NOT_TRACEABLE`.
        """
        # Not of the meta tree: constants that a model creates during tracing would have no values.
        self._traced = self._traced or trace_graph(self.hosted.pristine.apart())
        return self._traced

    def _with_kinds(
        self,
        recording: Recording,
        kinds: Collection[str],
        module: nn.Module,
        called: Called,
        guard: PassGuard,
    ) -> Recording:
        is_symbolic = recording.is_symbolic
        if "fx" in kinds:
            graph, given = self.graph(), copied_arguments(called)
            nodes = record_nodes(module, graph, *given, is_symbolic=is_symbolic, guard=guard)
            recording = replace(recording, nodes=nodes)
        if not {"fn", "attention"}.isdisjoint(kinds):
            functions = record_functions(module, *copied_arguments(called), is_symbolic=is_symbolic)
            recording = replace(recording, functions=functions, attention=attention_in(functions))
        return recording


def record_example(hosted: HostedModel) -> tuple[ModelRecorder, Recording]:
    """Record a pass on the example input, on the meta device if possible.

    A model that fails on one sample may need several: it is tried with two, and the recorder's model then has
    such examples.

    Raises:
        ServiceError: `MODEL_INVALID`, the model cannot run on it.
    """
    result = _recorded(hosted)
    if isinstance(result, Exception) and hosted.example_batch == 1:
        pair = replace(hosted, example_batch=2, known_pristine=hosted.pristine)
        again = _recorded(pair)
        result = result if isinstance(again, Exception) else again
    if not isinstance(result, Exception):
        return result
    raise ServiceError(
        ErrorReason.MODEL_INVALID,
        f"model '{hosted.spec.model_id}' fails on its example input of shape {hosted.input_shape} "
        f"({rejection(first_line(result))}); {_shape_advice(hosted)}",
    ) from result


def _recorded(hosted: HostedModel) -> tuple[ModelRecorder, Recording] | Exception:
    """Return a recorded pass on the example input, or the first error on data."""
    for args, keywords in example_arguments(hosted):
        with suppress(Exception):  # detection models, among others, read their data: no meta pass
            meta = make_meta_replica(hosted.module)
            on_meta = dict(zip(keywords, to_meta(tuple(keywords.values())), strict=True))
            recording = record_calls(make_replica(meta), to_meta(args), on_meta)
            hosted.pristine.note(recording.written)
            return ModelRecorder(hosted, meta), recording
    problem: Exception | None = None
    hosted.pristine.keep_parameters()
    for args, keywords in example_arguments(hosted):
        try:
            replica = Replica(hosted.pristine, module=hosted.pristine.apart())
            recording = replica.run(partial(_record_data, args=args, keywords=keywords))
            return ModelRecorder(hosted, None), recording
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            problem = problem or error
    return problem or ValueError("no example input")


def _record_data(module: nn.Module, args: Sequence[object], keywords: Mapping[str, object]) -> Recording:
    return record_calls(module, *copied_arguments((args, keywords)), is_symbolic=False)


def _shape_advice(hosted: HostedModel) -> str:
    if hosted.known_signature is not None:
        return f"set `[models.{hosted.spec.model_id}.inputs]` in its configuration; {hosted.signature}"
    if hosted.spec.factory is None:
        return "set `input_shape` in its configuration"
    return (
        "give the shape of one input without its batch: "
        f'{{"{hosted.spec.model_id}": {{"module": ..., "input_shape": (3, 32, 32)}}}}'
    )


def example_dtype(example: Recording) -> torch.dtype:
    """Return the dtype of the inputs of a recorded example: floats, or integers for tokens."""
    taken = (leaf.dtype for call in example.modules[""].calls for leaf in call.inputs)
    return next((dtype for dtype in taken if dtype is not None), torch.float32)


def examples(hosted: HostedModel) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the example input, and one of two samples for a model that does not take one."""
    yield from example_arguments(hosted)
    if hosted.example_batch == 1:
        yield from example_arguments(hosted, 2)


def example_arguments(
    hosted: HostedModel, batch: int | None = None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the example input, and integer zeros for a custom model of unknown inputs: it may take tokens."""
    inputs = hosted.example_inputs(batch)
    args, keywords = hosted.forward.called(hosted.example_names, inputs)
    yield tuple(args), keywords
    if hosted.spec.is_custom and hosted.known_signature is None:
        zeros = [torch.zeros_like(arg, dtype=torch.int64) for arg in inputs if isinstance(arg, torch.Tensor)]
        args, keywords = hosted.forward.called(hosted.example_names, zeros)
        yield tuple(args), keywords


def lacks_data(error: BaseException) -> bool:
    """Whether an error of a pass on the meta device is due to missing data."""
    result: BaseException | None = error
    while result is not None:
        # In torch 2.14: "Tensor.item() cannot be called on meta tensors", "Cannot copy out of meta tensor",
        # "... found at least two devices, cpu and meta", and operators without a meta kernel.
        if isinstance(result, NotImplementedError) or "meta" in str(result).lower():
            return True
        result = result.__cause__ or result.__context__
    return False


def made_arguments(
    hosted: HostedModel, signature: Signature, device: torch.device | str, number: int
) -> Called:
    """Return arguments of a signature; with integers of this value where there is data."""
    made = [fill(entry, device, number) for entry in signature]
    return hosted.forward.called([entry.name for entry in signature], made)


def fill(
    entry: TensorSignature, device: torch.device | str, number: int
) -> torch.Tensor | list[torch.Tensor] | Flag:
    """Return an argument of this signature; with values, seeded floats in [0, 1), or the given integer."""
    made = entry.make(device)
    if isinstance(made, Flag):
        return made
    generator = torch.Generator(device).manual_seed(0) if str(device) != "meta" else None
    for tensor in made if isinstance(made, list) else [made]:
        if generator is None:
            continue
        if tensor.is_floating_point():
            tensor.uniform_(generator=generator)
        else:
            tensor.fill_(number)
    return made


def to_meta(args: tuple[object, ...]) -> list[object]:
    """Return arguments without data, on the meta device."""

    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return [move(value) for value in args]
