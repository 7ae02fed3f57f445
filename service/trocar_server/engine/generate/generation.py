"""Generation: a run from prompts to the ends of their texts, for a caller on the event loop.

Sequences are computed one after the other, each alone: one has keys and values at a time.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.binding import bound_inputs
from trocar_server.engine.generate.decoding import DecodedPass, Decoding, check_taps, prompt_of
from trocar_server.engine.generate.kept_caches import KeptCaches
from trocar_server.engine.generate.model_sampling import with_model_sampling
from trocar_server.engine.generate.placing import Placing
from trocar_server.engine.generate.sampling import Sampler, Sampling
from trocar_server.engine.generate.steps import LEASE_S, MOST_AHEAD, End, Step, Steps
from trocar_server.engine.generate.text_taps import TextTaps, own_taps
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Payloads, Plan, TensorInput
from trocar_server.engine.resolve.edit_resolution import Expansions
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.checks import Checks
from trocar_server.engine.schedule.device import device_user
from trocar_server.engine.schedule.lease import ReplicaPool
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, make_meta_replica
from trocar_server.models.huggingface.causal import CacheSize, CausalModel
from trocar_server.surgery import PassGuard
from trocar_server.tasks import ended
from trocar_server.tensors.reductions import Lens, Readout, Reduction

_OF_TEXTS = frozenset(("input_ids", "attention_mask", "position_ids", "token_type_ids"))
"""The arguments that a text becomes; each pass gets its own."""

Run = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt whose request is checked.

    Attributes:
        prepared: Its request, as if it were the only prompt, with `own_taps`.
        ids: Its tokens.
        placing: The positions of the taps and edits in its text.
    """

    prepared: Prepared
    ids: tuple[int, ...]
    placing: Placing


@dataclass(frozen=True)
class Started:
    """What a run will do.

    Attributes:
        prompts: The ids of each prompt.
        expansions: The names that each tap expanded to.
        edit_expansions: The names that each edit's selector expanded to.
        sampling: As it is used.
        cache_bytes: Of the keys and values of the longest text.
    """

    prompts: tuple[tuple[int, ...], ...]
    expansions: tuple[tuple[str, ...], ...]
    edit_expansions: Expansions
    sampling: Sampling
    cache_bytes: int


class Continuation:
    """One sequence of a run: the text that follows a prompt.

        async with aclosing(continuation.passes()) as passes:
            async for steps in passes: ...

    Attributes:
        prompt: The index of its prompt.
        sample: The index of its sample.
        prompt_ids: The ids of its prompt.
        end: Why it ended; None before.
        edit_counts: For each edit of the request, the positions of the prompt, and those of generated tokens,
            at which it was applied; then those that its gate left out.
        pass_count: Passes that have ended.
        compute_s: Seconds of these passes.
        queue_s: Seconds of waiting for a replica.
    """

    def __init__(self, generation: "Generation", prompt: int, sample: int) -> None:
        self._generation = generation
        self._prompt = generation.prompts[prompt]
        self.prompt, self.sample = prompt, sample
        self.prompt_ids = self._prompt.ids
        self.end: End | None = None
        self.pass_count, self.compute_s, self.queue_s = 0, 0.0, 0.0
        self.edit_counts = [[0, 0, 0] for _ in self._prompt.prepared.plan.edits]

    async def passes(self) -> AsyncGenerator[list[Step], None]:
        """Yield passes with the tokens that they chose; the last one ends the text, or fills it.

        Between two passes the replica and the thread that owns torch are free for other calls. Keys and
        values are kept while this is open. See Note: [Passes ahead] in `steps`.

        Raises:
            ServiceError: Any error of a pass, and any reason to stop.
        """
        generation, prepared = self._generation, self._prompt.prepared
        sampling = generation.started.sampling
        device = prepared.checked.deployment.hosted.device
        sampler = Sampler(sampling, device, self.prompt, self.sample)
        decoding = Decoding(
            generation.causal,
            prepared,
            sampler,
            self._prompt.placing,
            generation.guard,
            sampling.stop_when,
        )
        steps = Steps(1 if sampling.stop else MOST_AHEAD)
        with generation.caches.kept(generation.started.cache_bytes):
            running = asyncio.create_task(self._run(decoding, steps))
            try:
                while self.end is None:
                    if not (together := await steps.next()):
                        await running  # has failed
                    for step in together:
                        await self._count(step)
                    yield together
                    steps.free(len(together))
            except BaseException:  # the caller is gone: all of the run ends, not this text alone
                running.cancel()
                raise
            finally:
                steps.stop()
                await ended(running)

    async def _run(self, decoding: Decoding, steps: Steps) -> None:
        """Run passes to the end of the text, as far ahead as there is room."""
        try:
            end = None
            while end is None and (most := await steps.room()):
                end = await self._lease(decoding, steps, most)
        finally:
            steps.close()

    async def _lease(self, decoding: Decoding, steps: Steps, most: int) -> End | None:
        """Run some passes with one lease; return why the text ends, if it does."""
        generation, checked = self._generation, self._prompt.prepared.checked
        deadline, pool = generation.deadline, checked.deployment.pool
        priority = checked.plan.execution.priority
        asked_at = time.perf_counter()
        device_user.set(checked.plan.model_id)
        async with pool.lease(deadline, rows=1, priority=priority, is_step=True) as replica:
            leased_at = time.perf_counter()

            def work() -> End | None:
                queue_s = leased_at - asked_at
                for left in reversed(range(most)):
                    decoded = decoding.next(replica)
                    end = self._end_after(decoded, len(decoding.generated))
                    step = Step(decoded, queue_s, end, time.perf_counter())
                    is_awaited = bool(pool.waiting_count) or generation.is_awaited()
                    steps.put(step)
                    if end is not None or not left or is_awaited or step.ended_at > leased_at + LEASE_S:
                        return end
                    queue_s = 0.0
                return None

            return await generation.run(work, generation.guard, deadline)  # type: ignore[no-any-return]

    def _end_after(self, decoded: DecodedPass, count: int) -> End | None:
        sampling = self._generation.started.sampling
        if decoded.choice.token_id in (sampling.stop_token_ids or ()):
            return End.STOP_TOKEN
        if decoded.is_stopped:
            return End.GATE
        return End.LENGTH if count >= sampling.max_new_tokens else None

    async def _count(self, step: Step) -> None:
        decoded = step.decoded
        if decoded.copies is not None:
            await decoded.copies.arrived()
        self._prompt.prepared.checked.deployment.pool.throughput.observe(1, decoded.compute_s)
        self.end = step.end
        self.pass_count += 1
        self.compute_s += decoded.compute_s
        self.queue_s += step.queue_s
        for place, (count, gated_out) in decoded.edited.items():
            self.edit_counts[place][decoded.first_position > 0] += count
            self.edit_counts[place][2] += gated_out


@dataclass(frozen=True)
class Generation:
    """A run that may begin; `start` makes it.

        for continuation in generation.continuations():
            async for steps in continuation.passes(): ...

    Attributes:
        prompts: Its prompts.
        causal: The model.
        started: What it will do.
        run: Runs work on the owner thread.
        is_awaited: Whether other work waits for that thread.
        deadline: A time of `time.monotonic()` in seconds, or None.
        guard: Stops its passes.
        caches: Counts the keys and values that it keeps.
    """

    prompts: Sequence[Prompt]
    causal: CausalModel
    started: Started
    run: Run
    is_awaited: Callable[[], bool]
    deadline: float | None
    guard: PassGuard
    caches: KeptCaches

    @property
    def hosted(self) -> HostedModel:
        """The model."""
        return self.prompts[0].prepared.checked.deployment.hosted

    @property
    def pool(self) -> ReplicaPool:
        """The model's replicas."""
        return self.prompts[0].prepared.checked.deployment.pool

    @property
    def step_s(self) -> float:
        """About how long its next pass takes, in seconds; 0 while too few passes were observed."""
        return self.pool.throughput.known_seconds()

    def continuations(self) -> Iterator[Continuation]:
        """Yield each sequence: the samples of the first prompt, then of the next; one is run at a time."""
        first, count = self.started.sampling.sample_index, self.started.sampling.sample_count
        for prompt in range(len(self.prompts)):
            for sample in range(first, first + count):
                yield Continuation(self, prompt, sample)


async def start(
    checks: Checks,
    deployment: Deployment,
    requests: Sequence[tuple[Plan, Payloads]],
    sampling: Sampling,
    run: Run,
    is_awaited: Callable[[], bool],
    caches: KeptCaches,
    deadline: float | None,
) -> Generation:
    """Check a run before anything is computed.

    Args:
        checks: Checks its plans.
        deployment: The model.
        requests: For each prompt taps, edits and the arguments that it became, and their payloads.
        sampling: How tokens are chosen.
        run: Runs work on the owner thread.
        is_awaited: Whether other work waits for that thread.
        caches: Counts the keys and values that are kept.
        deadline: A time of `time.monotonic()` in seconds, or None.

    Raises:
        ServiceError: With the reason why it cannot run.
    """
    causal = CausalModel.of(deployment.hosted)
    ends = causal.end_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
    sampling = replace(sampling, stop_token_ids=ends)
    if sampling.is_of_model:
        sampling = with_model_sampling(sampling, getattr(deployment.hosted.module, "generation_config", None))
    sampling = sampling.filled
    prompts = [await _prompt(checks, deployment, causal, request, sampling, deadline) for request in requests]
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    resolved = longest.prepared.checked.resolved
    assert resolved is not None  # refused before
    length = len(longest.ids) + sampling.max_new_tokens - 1  # the last token is not fed
    guard = PassGuard(deadline)
    if (size := deployment.cache_size) is None:
        size = deployment.cache_size = await run(partial(_cache_size, causal, deployment), guard, deadline)
    cache_bytes = size.of(length)
    _check_cache(cache_bytes, length, longest.prepared.checked)
    expansions, edits = resolved.expansions[: -len(own_taps(sampling))], resolved.surgery.expansions
    started = Started(tuple(prompt.ids for prompt in prompts), expansions, edits, sampling, cache_bytes)
    return Generation(prompts, causal, started, run, is_awaited, deadline, guard, caches)


async def _prompt(
    checks: Checks,
    deployment: Deployment,
    causal: CausalModel,
    request: tuple[Plan, Payloads],
    sampling: Sampling,
    deadline: float | None,
) -> Prompt:
    """Check the request of one prompt.

    Raises:
        ServiceError: With the reason why it cannot run.
    """
    plan, payloads = request
    plan = replace(plan, inputs=bound_inputs(deployment.hosted, plan.inputs))
    _check_request(plan)
    checked = await checks.check(replace(plan, taps=(*plan.taps, *own_taps(sampling))), deadline)
    if checked.resolved is None:
        raise checked.doubt or ServiceError(
            ErrorReason.INVALID_ARGUMENT, "which modules this model calls depends on its data"
        )
    taps = TextTaps.of(checked.plan, checked.resolved.targets)
    check_taps(taps.asked)
    if sampling.stop_when is not None and taps.stop is not None:
        sampling.stop_when.check(taps.stop)
        payloads = replace(payloads, taps=[*payloads.taps, *sampling.stop_when.operands])
    prepared = Prepared(checked, payloads, *checked.no_images)
    ids = tuple(prompt_of(prepared))
    _check_length(causal, len(ids), sampling)
    _check_ids(causal, ids, sampling)
    placing = Placing.of(plan, len(ids), sampling.max_new_tokens)
    placing.check(checked.resolved)
    return Prompt(prepared, ids, placing)


def _check_request(plan: Plan) -> None:
    problem = ""
    if plan.objective is not None:
        problem = "gradients are computed on finished texts: ask `gradients` with prompt and generated tokens"
    elif plan.sources:
        problem = "edits that take values from other inputs are not supported while text is generated"
    elif plan.start_at is not None:
        problem = "it starts at the prompt; leave start_at out"
    elif any(tap.selector.kind == "fx" for tap in plan.taps):
        problem = "nodes of the traced graph are computed apart from the text; tap modules"
    elif any(tap.statistics or not _are_readouts(tap.reductions) for tap in plan.taps):
        problem = (
            "taps have values, lenses and readouts alone here; reduce values, or take statistics, with "
            "`extract`"
        )

    named = {entry.name: entry for entry in plan.inputs}
    entry = named.get("input_ids")
    shape = entry.shape if isinstance(entry, TensorInput) else ()
    if not problem and (len(shape) != 2 or shape[0] != 1 or not shape[1]):
        problem = "a prompt has at least one token"
    if others := named.keys() - _OF_TEXTS:
        problem = f"{', '.join(sorted(others))}: only texts are continued, without images and other inputs"
    if problem:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)


def _are_readouts(reductions: Sequence[Reduction]) -> bool:
    return all(isinstance(reduction, (Lens, Readout)) for reduction in reductions)


def _cache_size(causal: CausalModel, deployment: Deployment) -> CacheSize:
    """Return how large the keys and values of a text become. Owner thread only."""
    return causal.cache_size(make_meta_replica(deployment.hosted.module))


def _check_cache(cache_bytes: int, length: int, checked: CheckedPlan) -> None:
    """Refuse a run whose keys and values do not fit beside the pass of its prompt."""
    needed, limit = cache_bytes + checked.memory_bytes, checked.limits.max_pass_bytes
    if needed > limit:
        raise ServiceError(
            ErrorReason.PASS_TOO_LARGE,
            f"keys and values of {length:,} positions take {cache_bytes:,} bytes, and with the pass of the "
            f"prompt {needed:,}; the limit is {limit:,}. Nothing was computed. Ask for fewer tokens, or send "
            "a shorter prompt",
            byte_count=str(needed),
            limit=str(limit),
        )


def _check_ids(causal: CausalModel, prompt: Sequence[int], sampling: Sampling) -> None:
    given = {
        "the prompt": prompt,
        "stop_token_ids": sampling.stop_token_ids or (),
        "logit_bias": sampling.logit_bias,
    }
    for name, ids in given.items():
        for token_id in ids:
            if not 0 <= token_id < causal.vocabulary:
                raise ServiceError(
                    ErrorReason.INVALID_ARGUMENT,
                    f"{name} has the token id {token_id}, and the model has 0 to {causal.vocabulary - 1}",
                )


def _check_length(causal: CausalModel, prompt: int, sampling: Sampling) -> None:
    most, switch = causal.max_positions, causal.switch_position
    if switch is not None and prompt <= switch < prompt + sampling.max_new_tokens - 1:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"behind {switch:,} positions this model computes all keys and values anew, with other factors, "
            f"so positions would have two values; with {prompt:,} tokens in the prompt, give max_new_tokens "
            f"of at most {switch - prompt + 1:,}, or a prompt of more than {switch:,}",
        )
    needed = prompt + sampling.max_new_tokens - 1  # the last token is not fed
    if most is not None and needed > most:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"the prompt has {prompt:,} tokens, and with max_new_tokens={sampling.max_new_tokens:,} the text "
            f"may need {needed:,} positions, as the last token is not fed; the model has {most:,}",
        )
