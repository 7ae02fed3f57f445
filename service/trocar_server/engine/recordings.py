"""Recording passes of a hosted model: without data where that can be, on example data elsewhere."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.plan import Signature, TensorSignature, split_arguments
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, make_meta_replica, make_replica
from trocar_server.surgery import PassGuard, Recording, record_calls, record_functions, record_nodes
from trocar_server.surgery.graph import TracedGraph, trace_graph

Called = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of a forward."""


@dataclass
class Recorder:
    """Records passes of one model. Owner thread only.

    Attributes:
        hosted: The model.
        meta: Its tree without data, or None where it has no pass without data.
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
        """Record a pass on inputs of this form, and the nodes (`fx`) and functions (`fn`) asked for.

        See `record_calls` for `check`.

        Raises:
            ServiceError: `NOT_TRACEABLE`, nodes are asked for and there are none.
            Exception: What the model raises on such inputs.
        """
        is_symbolic = self.meta is not None
        device = self.hosted.device if self.meta is None else "meta"
        arguments = [_fill(entry, device) for entry in signature]
        called = split_arguments([entry.name for entry in signature], arguments)
        module = self.meta if self.meta is not None else make_replica(self.hosted.module)
        with guard.watching(module):
            recording = record_calls(module, *called, is_symbolic=is_symbolic, check=check)
            return self._with_kinds(recording, kinds, module, called, guard)

    def record_data(self, called: Called, kinds: Collection[str], guard: PassGuard) -> Recording:
        """Record a pass on a caller's own data, for a model that decides on it."""
        module = make_replica(self.hosted.module)
        recording = record_calls(module, *called, is_symbolic=False)
        return self._with_kinds(recording, kinds, module, called, guard)

    def graph(self) -> TracedGraph:
        """Return the model's traced graph, made when it is first needed.

        Raises:
            ServiceError: `NOT_TRACEABLE`.
        """
        # Not of the meta tree: constants that a model makes while it is traced would have no values.
        self._traced = self._traced or trace_graph(make_replica(self.hosted.module))
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
            graph = self.graph()
            nodes = record_nodes(module, graph, *called, is_symbolic=is_symbolic, guard=guard)
            recording = replace(recording, nodes=nodes)
        if "fn" in kinds:
            functions = record_functions(module, *called, is_symbolic=is_symbolic)
            recording = replace(recording, functions=functions)
        return recording


def record_example(hosted: HostedModel) -> tuple[Recorder, Recording]:
    """Record a pass on the example input, without data if that can be.

    Raises:
        ServiceError: `MODEL_INVALID`, the model cannot run on it.
    """
    for args in example_arguments(hosted):
        with suppress(Exception):  # detection models, among others, look at their data: no pass without it
            meta = make_meta_replica(hosted.module)
            return Recorder(hosted, meta), record_calls(meta, _to_meta(args))
    problem: Exception | None = None
    for args in example_arguments(hosted):
        try:
            recording = record_calls(make_replica(hosted.module), args, is_symbolic=False)
            return Recorder(hosted, None), recording
        except Exception as error:  # noqa: BLE001 - whatever the model raises
            problem = problem or error
    raise ServiceError(
        ErrorReason.MODEL_INVALID,
        f"model '{hosted.spec.model_id}' fails on its example input of shape {hosted.input_shape} "
        f"({first_line(problem)}); {_shape_advice(hosted)}",
    ) from problem


def _shape_advice(hosted: HostedModel) -> str:
    if hosted.spec.factory is None:
        return "set `input_shape` in its configuration"
    return (
        "give the shape of one input without its batch: "
        f'{{"{hosted.spec.model_id}": {{"module": ..., "input_shape": (3, 32, 32)}}}}'
    )


def example_arguments(hosted: HostedModel) -> Iterator[tuple[Any, ...]]:
    """Yield the example input, and for a custom model zeros of whole numbers too: it may take tokens."""
    args = hosted.example_inputs()
    yield args
    if hosted.spec.is_custom:
        yield tuple(torch.zeros_like(arg, dtype=torch.int64) for arg in args if isinstance(arg, torch.Tensor))


def _fill(entry: TensorSignature, device: torch.device | str) -> torch.Tensor | list[torch.Tensor]:
    """Return an argument of this form, with seeded values in [0, 1) on a device that has values."""
    made = entry.make(device)
    generator = torch.Generator(device).manual_seed(0) if str(device) != "meta" else None
    for tensor in made if isinstance(made, list) else [made]:
        if generator is None:
            continue
        if tensor.is_floating_point():
            tensor.uniform_(generator=generator)
        else:
            tensor.zero_()
    return made


def _to_meta(args: tuple[object, ...]) -> list[object]:
    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return [move(value) for value in args]
