"""Codec of generation: options from the wire, and what happened to it."""

import math
from collections.abc import Mapping, Sequence

from trocar_api.v1 import generation_pb2 as pb
from trocar_api.v1.extraction_pb2 import TokenIds
from trocar_api.v1.position_pb2 import Gate as GateMessage
from trocar_server.engine.generate.decoding import DecodedPass
from trocar_server.engine.generate.generation import Continuation, Started
from trocar_server.engine.generate.prompts import MAX_SEQUENCES
from trocar_server.engine.generate.sampling import MAX_LOGPROBS, Sampling
from trocar_server.engine.generate.steps import End
from trocar_server.engine.generate.stop_gate import STOP_WHEN, StopGate
from trocar_server.rpc.codec.edits import NO_LISTS, StoredList, gate_from_wire
from trocar_server.rpc.codec.fields import check_count, invalid
from trocar_server.rpc.codec.replies import edit_expansions_to_wire, expansions_to_wire
from trocar_server.rpc.codec.stored.named_directions import NO_GATES, Gates
from trocar_server.rpc.codec.text import sendable

_MAX_NEW_TOKENS = 1 << 20
_LEAST_TEMPERATURE = 1e-4
_MAX_IDS, _MAX_BIASES, _MAX_STOPS, _MAX_STOP_CHARACTERS = 256, 1024, 16, 256
_REASONS = {
    End.LENGTH: pb.FINISH_REASON_LENGTH,
    End.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    End.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    End.GATE: pb.FINISH_REASON_GATE,
}


def gates_of(options: pb.GenerationOptions) -> Gates:
    """Return the gates of a run's options, whose directions are to be found."""
    return {STOP_WHEN: options.stop_when} if options.HasField("stop_when") else NO_GATES


def sampling_from_wire(
    options: pb.GenerationOptions, stored: Mapping[str, StoredList] = NO_LISTS
) -> Sampling:
    """Convert and check the options of a run.

    Args:
        options: As received.
        stored: What the directions of `gates_of` stand for, by their fields.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    _check_counts(options)
    usual = Sampling()
    return Sampling(
        max_new_tokens=_whole("max_new_tokens", options, usual.max_new_tokens, _MAX_NEW_TOKENS),
        temperature=_temperature(options),
        top_k=_whole("top_k", options, 0, _MAX_NEW_TOKENS) or None,
        top_p=_share("top_p", options),
        min_p=_share("min_p", options),
        repetition_penalty=_number("repetition_penalty", options, 0.01, 100.0),
        presence_penalty=_number("presence_penalty", options, -100.0, 100.0) or 0.0,
        logit_bias={
            each.token_id: _in_range("logit_bias", each.bias, -1e4, 1e4) for each in options.logit_bias
        },
        seed=options.seed,
        stop_token_ids=tuple(options.stop_token_ids) if options.has_stop_token_ids else None,
        stop=tuple(options.stop),
        logprobs=options.logprobs,
        sample_count=_whole("n", options, 1, MAX_SEQUENCES),
        sample_index=options.sample_index,
        is_of_model=options.sampling == pb.SAMPLING_SOURCE_MODEL,
        stop_when=_stop_gate(options.stop_when, stored[STOP_WHEN]) if STOP_WHEN in stored else None,
    )


def _stop_gate(when: GateMessage, direction: StoredList) -> StopGate:
    return StopGate(when.direction, gate_from_wire(STOP_WHEN, when, direction), direction.operands)


def _check_counts(options: pb.GenerationOptions) -> None:
    check_count("options.stop_token_ids", len(options.stop_token_ids), _MAX_IDS)
    check_count("options.logit_bias", len(options.logit_bias), _MAX_BIASES)
    check_count("options.stop", len(options.stop), _MAX_STOPS)
    if len({entry.token_id for entry in options.logit_bias}) < len(options.logit_bias):
        raise invalid("options.logit_bias", "has a token twice")
    if options.stop_token_ids and not options.has_stop_token_ids:
        raise invalid("options.stop_token_ids", "is set without has_stop_token_ids")
    for text in options.stop:
        if not 1 <= len(text) <= _MAX_STOP_CHARACTERS:
            raise invalid("options.stop", f"a stop string has 1 to {_MAX_STOP_CHARACTERS} characters")
    if not 0 <= options.logprobs <= MAX_LOGPROBS:
        raise invalid("options.logprobs", f"must be 0 to {MAX_LOGPROBS:,}")
    if options.sample_index < 0:
        raise invalid("options.sample_index", "counts from 0")
    if options.sampling not in pb.SamplingSource.values():
        raise invalid("options.sampling", f"{options.sampling} has no meaning")


def _whole(name: str, options: pb.GenerationOptions, usual: int, most: int) -> int:
    if not options.HasField(name):  # type: ignore[arg-type]
        return usual
    value = int(getattr(options, name))
    if not 1 <= value <= most:
        raise invalid(f"options.{name}", f"must be 1 to {most:,}, not {value:,}")
    return value


def _share(name: str, options: pb.GenerationOptions) -> float | None:
    if not options.HasField(name):  # type: ignore[arg-type]
        return None
    value = float(getattr(options, name))
    if not 0.0 < value <= 1.0:
        raise invalid(f"options.{name}", f"must be above 0 and at most 1, not {value:g}")
    return value


def _number(name: str, options: pb.GenerationOptions, least: float, most: float) -> float | None:
    if not options.HasField(name):  # type: ignore[arg-type]
        return None
    return _in_range(name, float(getattr(options, name)), least, most)


def _temperature(options: pb.GenerationOptions) -> float | None:
    value = _number("temperature", options, 0.0, 100.0)
    if value and value < _LEAST_TEMPERATURE:  # logits divided by it would be infinite
        least = _LEAST_TEMPERATURE
        raise invalid(
            "options.temperature", f"is {value:g}; give 0 for the most likely token, or at least {least:g}"
        )
    return value


def _in_range(name: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise invalid(f"options.{name}", f"must be {least:g} to {most:g}, not {value:g}")
    return value


def started_to_wire(
    started: Started, taps: Sequence[str], texts: Sequence[Sequence[str]]
) -> pb.GenerationStarted:
    """Describe what a run will do.

    Args:
        started: The run.
        taps: The selector of each tap.
        texts: Of the tokens of each prompt.
    """
    return pb.GenerationStarted(
        prompts=[TokenIds(ids=ids) for ids in started.prompts],
        expansions=expansions_to_wire(taps, started.expansions),
        edit_expansions=edit_expansions_to_wire(started.edit_expansions),
        options=_options_to_wire(started.sampling),
        cache_byte_count=started.cache_bytes,
        prompt_texts=[pb.TokenTexts(texts=map(sendable, pieces)) for pieces in texts],
    )


def _options_to_wire(sampling: Sampling) -> pb.GenerationOptions:
    return pb.GenerationOptions(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=[pb.TokenBias(token_id=key, bias=bias) for key, bias in sampling.logit_bias.items()],
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        has_stop_token_ids=True,
        stop=sampling.stop,
        logprobs=sampling.logprobs,
        n=sampling.sample_count,
        sample_index=sampling.sample_index,
        sampling=pb.SAMPLING_SOURCE_MODEL if sampling.is_of_model else pb.SAMPLING_SOURCE_UNSPECIFIED,
        stop_when=None if sampling.stop_when is None else _gate_to_wire(sampling.stop_when),
    )


def _gate_to_wire(stop: StopGate) -> GateMessage:
    gate = stop.gate
    return GateMessage(direction=stop.direction, place=gate.place, above=gate.above, below=gate.below)


def token_to_wire(
    continuation: Continuation, decoded: DecodedPass, text: str, likely: Sequence[str]
) -> pb.GeneratedToken:
    """Describe a generated token.

    Args:
        continuation: Its sequence.
        decoded: The pass that chose it.
        text: What it adds to the text.
        likely: The texts of the most likely tokens.
    """
    choice = decoded.choice
    return pb.GeneratedToken(
        prompt=continuation.prompt,
        sample=continuation.sample,
        position=decoded.first_position + decoded.token_count,
        token_id=choice.token_id,
        text=sendable(text),
        logprob=choice.logprob,
        likely=[
            pb.LikelyToken(token_id=token_id, text=sendable(own), logprob=logprob)
            for (token_id, logprob), own in zip(choice.likely, likely, strict=True)
        ],
    )


def sequence_to_wire(continuation: Continuation, text: str) -> pb.SequenceFinished:
    """Describe the end of a sequence.

    Args:
        continuation: The sequence.
        text: What was held back of its text.
    """
    assert continuation.end is not None
    return pb.SequenceFinished(
        prompt=continuation.prompt,
        sample=continuation.sample,
        reason=_REASONS[continuation.end],
        text=sendable(text),
        edit_counts=[
            pb.EditCount(prompt=p, generated=g, gated_out=o) for p, g, o in continuation.edit_counts
        ],
        pass_count=continuation.pass_count,
    )
