"""Decoding: the passes of one text, each from the keys and values of those before. Owner thread only.

# Note: [Exact generation]
Each text is computed alone: one pass for its prompt, in one piece, and one for each generated token, with the
arguments of transformers' own generation. So logits, and with them greedy tokens, have the bits of
`transformers.generate`. The value at a position is what the model computes from the token there; its logits
choose the token of the next position. So the last generated token has no values: no pass computes them.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import tensor_of
from trocar_server.engine.execute.collecting import Collected, PassSpec
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.generate.placing import Placing, Span
from trocar_server.engine.generate.sampling import Choice, Sampler
from trocar_server.engine.generate.stop_gate import StopGate
from trocar_server.engine.generate.text_taps import TextTaps
from trocar_server.engine.request.plan import TensorInput
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.engine.run.bound_call import BoundCall, Prepared
from trocar_server.engine.run.logit_lens import heads_of
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.run.pass_result import FeatureMap, Heads, Operands, finish_pass, not_collected
from trocar_server.engine.run.ready import Ready, make_ready
from trocar_server.engine.schedule.lease import Replica, StateWrittenError
from trocar_server.engine.transfer import Copies, this_thread
from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.causal import CausalModel
from trocar_server.surgery import CallsDifferError, PassGuard
from trocar_server.surgery.axes.layout import tokens_dim_of


@dataclass(frozen=True)
class DecodedPass:
    """One pass of a text.

    Attributes:
        first_position: The position of its first token.
        token_count: Its tokens.
        choice: The token that follows.
        feature_maps: The values of the taps, a row for each position along the dimension of the tokens.
        positions: Of the rows of each value, by its name.
        edited: By place in the request, for each edit that ran, the number of positions that it changed.
        compute_s: Seconds.
        copies: Pending copies of the values to the host, or None.
    """

    first_position: int
    token_count: int
    choice: Choice
    feature_maps: tuple[FeatureMap, ...]
    positions: Mapping[str, Sequence[int]]
    edited: Mapping[int, tuple[int, int]]
    compute_s: float
    copies: Copies | None
    is_stopped: bool = False
    """Whether the gate that ends the text is open at its last position."""


class Decoding:
    """The state of one text: its tokens, and its keys and values.

    Args:
        causal: The model.
        prepared: Its prompt, taps and edits, and `own_taps`.
        sampler: Chooses its tokens.
        placing: The positions of its taps and edits.
        guard: Stops its passes.
        stop_when: The gate that ends the text; None for none.

    Attributes:
        prompt: The ids of the prompt.
        generated: The ids of the tokens that were chosen.
    """

    def __init__(
        self,
        causal: CausalModel,
        prepared: Prepared,
        sampler: Sampler,
        placing: Placing,
        guard: PassGuard,
        stop_when: StopGate | None = None,
    ) -> None:
        self._placing = placing
        self._stop_when = stop_when
        self.prompt = prompt_of(prepared)
        self.generated: list[int] = []
        self._causal = causal
        self._prepared = prepared
        self._sampler = sampler
        self._guard = guard
        self._cache = causal.empty_cache()
        self._resolved: _Resolved | None = None
        self._row_shapes: dict[str, tuple[int, ...]] = {}

    def next(self, replica: Replica) -> DecodedPass:
        """Run the next pass, and choose the token that follows.

        Raises:
            ServiceError: Any error of the request or the model, and any reason to stop.
        """
        checked = self._prepared.checked
        try:
            with domain_errors(checked.deployment.hosted, checked.memory_bytes):
                self._guard.check()
                return self._next_or_again(Eager(replica))
        except CallsDifferError as differs:
            raise ServiceError(
                ErrorReason.EDIT_NOT_POSSIBLE,
                f"'{differs}' has another shape, or is called more or less often, in a pass of one token "
                "than in that of the prompt; choose another value, or use `extract` on the finished text",
                name=str(differs),
            ) from None

    def _next_or_again(self, executor: Eager) -> DecodedPass:
        """Run the next pass, that of the prompt again where it was the first to be seen to write."""
        if not self.generated:
            with suppress(StateWrittenError):
                return self._next(executor)
            self._cache = self._causal.empty_cache()
        return self._next(executor)

    def _next(self, executor: Eager) -> DecodedPass:
        started = time.perf_counter()
        ids, first = self.prompt, 0
        if self.generated:
            ids, first = self.generated[-1:], len(self.prompt) + len(self.generated) - 1
        span = Span(first, len(ids))
        resolved = self._resolved = self._resolved or self._resolve(executor)
        ready, taps = resolved.ready, resolved.taps
        hosted = ready.bound.checked.deployment.hosted
        arguments = self._causal.arguments(ids, first, self._cache, hosted.device)
        wanted = [target for target in taps.asked if self._placing.wants(target, span)]
        own = [taps.logits] if taps.stop is None else [taps.logits, taps.stop]
        names = [target.target.name for target in (*wanted, *own)]
        spec = self._placing.spec(ready.call.pass_spec, span, names, resolved.shapes)
        if len(self.generated) == 1:
            spec = replace(spec, targets=[*spec.targets, *self._placing.probes(ready.call.pass_spec)])
        call = replace(ready.call, arguments=([], arguments), pass_spec=spec)
        (collected,) = executor.run([call])
        with torch.inference_mode() if call.is_inference else torch.no_grad():
            return self._finished(resolved, wanted, spec, collected, span, started)

    def _resolve(self, executor: Eager) -> "_Resolved":
        """Resolve the request for the prompt; each pass calls the same modules, on fewer tokens."""
        ready = make_ready(executor, BoundCall.of(self._prepared, self._guard))
        targets = ready.resolved.targets
        return _Resolved(
            replace(ready, call=replace(ready.call, pass_spec=replace(ready.call.pass_spec, calls={}))),
            TextTaps.of(ready.bound.checked.plan, targets),
            _shapes(ready.resolved),
            heads_of(self._prepared.checked.deployment, targets),
        )

    def _finished(
        self,
        resolved: "_Resolved",
        wanted: Sequence[TapTarget],
        spec: PassSpec,
        collected: Collected,
        span: Span,
        started: float,
    ) -> DecodedPass:
        placing, own = self._placing, resolved.taps
        placing.check_probes(spec, collected)
        scores = collected.values[own.logits.target.name][0, -1].float()
        choice = self._sampler.choose(scores, self.prompt, self.generated)
        self.generated.append(choice.token_id)
        taps = resolved.ready.bound.operands.taps
        is_stopped = own.stop is not None and self._is_stopped(own.stop, collected, taps)
        values: dict[str, torch.Tensor] = {}
        positions: dict[str, Sequence[int]] = {}
        for target in wanted:
            name = target.target.name
            if name in collected.values:
                values[name], positions[name] = placing.collected(target, collected.values[name], span)
                self._check_rows(target, values[name])
        collected = replace(collected, values=values)
        result = finish_pass(collected, wanted, self._guard, taps, started, heads=resolved.heads)
        transfers = this_thread.transfers
        copies = transfers.take() if transfers.has_begun else None
        edited = placing.edited(spec, span, collected)
        maps = result.feature_maps
        compute_s = result.compute_s
        return DecodedPass(
            span.first, span.count, choice, maps, positions, edited, compute_s, copies, is_stopped
        )

    def _is_stopped(self, target: TapTarget, collected: Collected, operands: Operands) -> bool:
        """Return whether the gate that ends the text is open; see Note: [Stop gates]."""
        name, gate = target.target.name, self._stop_when
        assert gate is not None  # it has the target
        if name not in collected.values:
            raise not_collected(target)
        return gate.is_open(target, collected.values[name], operands[target.tap_index])

    def _check_rows(self, target: TapTarget, value: torch.Tensor) -> None:
        """Refuse values whose rows have another shape in each pass, such as scores of all keys."""
        name, dim = target.target.name, tokens_dim_of(target.target.layout)
        shape = tuple(size for place, size in enumerate(value.shape) if place != dim)
        if self._row_shapes.setdefault(name, shape) != shape:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"a row of '{name}' has another shape in each pass, {self._row_shapes[name]} and then "
                f"{shape}; ask for it with `extract` on the finished text",
                name=name,
            )


@dataclass(frozen=True)
class _Resolved:
    """What all passes of a text have in common.

    Attributes:
        ready: The request, resolved for the prompt.
        taps: What is collected.
        shapes: Of tapped and edited values in the pass of the prompt, by name.
        heads: What reads values as tokens.
    """

    ready: Ready
    taps: TextTaps
    shapes: Mapping[str, Sequence[int] | None]
    heads: Heads


def _shapes(resolved: Resolved) -> Mapping[str, Sequence[int] | None]:
    """Return the shapes of tapped and edited values in the pass of the prompt, by name."""
    shapes = {entry.target.name: entry.leaf.shape for entry in resolved.targets}
    return shapes | {entry.target.name: entry.leaf.shape for entry in resolved.surgery.edits}


def prompt_of(prepared: Prepared) -> list[int]:
    """Return the token ids of a prompt."""
    place = prepared.checked.argument_names.index("input_ids")
    entry, payload = prepared.plan.inputs[place], prepared.payloads.inputs[place]
    assert isinstance(entry, TensorInput)
    return [int(number) for number in tensor_of(entry.dtype, entry.shape, payload)[0]]


def check_taps(targets: Sequence[TapTarget]) -> None:
    """Refuse taps without one dimension of tokens, whose rows would belong to no position.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, naming the first.
    """
    for target in targets:
        layout = target.target.layout
        if tokens_dim_of(layout) is None:
            axes = ", ".join(layout.axes) if layout is not None else "unknown"
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"'{target.target.name}' has no single dimension of tokens (its dimensions: {axes}), so its "
                "values belong to no position; ask for it with `extract` on the finished text",
            )
