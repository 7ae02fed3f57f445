"""Generation messages as bytes: the request, and the tokens and values of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from trocar._base.tensors import Array
from trocar._request.text_positions import Gate
from trocar._result.feature_maps import FeatureMapInfo
from trocar._result.generated import (
    EditCount,
    FinishReason,
    GeneratedSequence,
    GeneratedToken,
    SequenceParts,
)
from trocar._result.likely_tokens import LikelyToken
from trocar._wire.from_wire import expansions
from trocar._wire.replies import ReplyAssembler
from trocar._wire.requests import ExtractCall
from trocar.errors import BadReplyError
from trocar_api.v1 import extraction_pb2
from trocar_api.v1 import generation_pb2 as pb
from trocar_api.wire import WireError, split_message

_REASONS: Mapping[int, FinishReason] = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOP_TOKEN: "stop_token",
    pb.FINISH_REASON_STOP_STRING: "stop_string",
    pb.FINISH_REASON_GATE: "gate",
}


Sampling: TypeAlias = Literal["model"]
"""Where options that are not given come from: the model's generation configuration."""

_SOURCES: Mapping[str | None, pb.SamplingSource.ValueType] = {
    None: pb.SAMPLING_SOURCE_UNSPECIFIED,
    "model": pb.SAMPLING_SOURCE_MODEL,
}

_OPTIONAL: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and when the text ends; see `Client.generate`."""

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    logprobs: int = 0
    n: int = 1
    sample_index: int = 0
    sampling: Sampling | None = None
    stop_when: Gate | None = None

    def to_wire(self) -> pb.GenerationOptions:
        """Return the message.

        Raises:
            ValueError: A number is out of the range of the protocol.
        """
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative")
        if self.sampling not in _SOURCES:
            raise ValueError(f"sampling={self.sampling!r} is not 'model' or None")
        return pb.GenerationOptions(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=[pb.TokenBias(token_id=key, bias=bias) for key, bias in self.logit_bias.items()],
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            has_stop_token_ids=self.stop_token_ids is not None,
            logprobs=self.logprobs,
            n=self.n,
            sample_index=self.sample_index,
            sampling=_SOURCES[self.sampling],
            stop_when=None if self.stop_when is None else self.stop_when.to_wire(),
        )


def sampling_of(options: pb.GenerationOptions | None) -> Mapping[str, object]:
    """Return options by the names of `Client.generate`; without any before the server has sent them."""
    if options is None:
        return {}
    options_by_name: dict[str, object] = {
        name: getattr(options, name) for name in ("max_new_tokens", "seed", "logprobs", "n", "sample_index")
    }
    for name in _OPTIONAL:
        options_by_name[name] = getattr(options, name) if options.HasField(name) else None
    options_by_name["logit_bias"] = {each.token_id: each.bias for each in options.logit_bias}
    options_by_name["stop"], options_by_name["stop_token_ids"] = (
        tuple(options.stop),
        tuple(options.stop_token_ids),
    )
    options_by_name["stop_when"] = Gate.of(options.stop_when) if options.HasField("stop_when") else None
    return options_by_name


def generate_call(request: ExtractCall, options: SamplingOptions) -> ExtractCall:
    """Return the request of a run: that of one pass, with how tokens are chosen."""
    pass_request = extraction_pb2.ExtractRequest.FromString(request.head)
    head = pb.GenerateRequest(extraction=pass_request, options=options.to_wire())
    return ExtractCall(head.SerializeToString(), request.payloads)


class GenerationAssembler:
    """Assembles a run from its messages.

    Args:
        model_id: The model of the call.
        widens: Whether float16 values that were float32 come as float32.

    Attributes:
        sequences: The sequences that have begun.
        prompts: The ids of each prompt.
        expected_count: The number of sequences; 0 before the first message.
        tokens: The generated tokens so far, of all sequences.
        expansions: The names that each tap's selector became.
        edit_expansions: The names that each edit's selector became.
        options: The options as the server uses them; None before the first message.
        finished: The last message; None before.
        info: Of the values, by name: as of the first pass that has them.
    """

    def __init__(self, model_id: str, *, widens: bool = False) -> None:
        self._model_id = model_id
        self._widens = widens
        self._reply: ReplyAssembler | None = None
        self._waiting: list[GeneratedToken] = []
        self._parts: dict[tuple[int, int], SequenceParts] = {}
        self.sequences: list[GeneratedSequence] = []
        self._prompt_texts: tuple[tuple[str, ...], ...] = ()
        self.prompts: tuple[tuple[int, ...], ...] = ()
        self.expected_count = 0
        self.tokens: list[GeneratedToken] = []
        self.expansions: dict[str, tuple[str, ...]] = {}
        self.edit_expansions: dict[str, tuple[str, ...]] = {}
        self.options: pb.GenerationOptions | None = None
        self.finished: pb.GenerationFinished | None = None
        self.info: dict[str, FeatureMapInfo] = {}

    def feed(self, message: bytes) -> list[GeneratedToken]:
        """Parse the next message, and return the tokens of the pass that it completes.

        Raises:
            BadReplyError: The message breaks the contract.
        """
        try:
            head, chunks = split_message(message)
            response = pb.GenerateResponse.FromString(head)
        except (WireError, DecodeError) as error:
            raise BadReplyError(f"a message of the run cannot be decoded: {error}") from error
        if response.HasField("started"):
            self._start(response.started)
        if response.HasField("sequence"):
            self._end_sequence(response.sequence)
        if response.HasField("finished"):
            self.finished = response.finished
        if response.tokens:
            self._begin(response)
        if self._reply is None:
            if chunks:
                raise BadReplyError("the run has bytes that belong to no pass")
            return []
        for chunk in chunks:
            self._reply.place(chunk)
        return self._end() if self._reply.is_complete else []

    def _start(self, started: pb.GenerationStarted) -> None:
        self.prompts = tuple(tuple(prompt.ids) for prompt in started.prompts)
        self._prompt_texts = tuple(tuple(prompt.texts) for prompt in started.prompt_texts)
        self._check_prompt_texts()
        self.options = started.options
        self.expected_count = len(self.prompts) * started.options.n
        self.expansions = expansions(started.expansions)
        self.edit_expansions = {entry.selector: tuple(entry.names) for entry in started.edit_expansions}

    def _check_prompt_texts(self) -> None:
        if self._prompt_texts and [*map(len, self._prompt_texts)] != [*map(len, self.prompts)]:
            raise BadReplyError("the run has not one text for each token of its prompts")

    def _begin(self, response: pb.GenerateResponse) -> None:
        if self._reply is not None:
            raise BadReplyError("the run begins a pass before the end of the one before")
        self._reply = ReplyAssembler(self._model_id, widens=self._widens)
        self._reply.begin(extraction_pb2.ExtractResponse(feature_maps=response.feature_maps))
        self._waiting = [_token(token) for token in response.tokens]

    def _end(self) -> list[GeneratedToken]:
        assert self._reply is not None
        maps, self._reply = self._reply.finish(), None
        tokens, self._waiting = self._waiting, []
        parts = self._of(tokens[0].prompt, tokens[0].sample)
        for name, array in maps.items():
            info = maps.info[name]
            own = maps.info.get(info.companion_of, info)
            if "tokens" not in own.axes or not own.token_positions:
                raise BadReplyError(f"the values of {name!r} belong to no position")
            self.info.setdefault(name, info)
            parts.rows.setdefault(name, []).append(_rows_of(array, own.axes))
            parts.positions.setdefault(name, []).extend(own.token_positions[0])
            parts.token_texts.update(info.token_texts)
        parts.tokens += tokens
        self.tokens += tokens
        return tokens

    def _of(self, prompt: int, sample: int) -> SequenceParts:
        """Return a sequence; the first message of its tokens begins it."""
        if (prompt, sample) not in self._parts:
            if not 0 <= prompt < len(self.prompts):
                raise BadReplyError(
                    f"the run has a token of prompt {prompt}, and {len(self.prompts)} prompts"
                )
            texts = self._prompt_texts[prompt] if self._prompt_texts else ()
            parts = SequenceParts(prompt, sample, self.prompts[prompt], self.expansions, texts)
            self._parts[prompt, sample] = parts
            self.sequences.append(GeneratedSequence(parts))
        return self._parts[prompt, sample]

    def _end_sequence(self, sequence: pb.SequenceFinished) -> None:
        parts = self._of(sequence.prompt, sequence.sample)
        parts.held_text, parts.reason = sequence.text, _REASONS.get(sequence.reason, "length")
        parts.edit_counts = tuple(
            EditCount(each.prompt, each.generated, each.gated_out) for each in sequence.edit_counts
        )

    @property
    def only(self) -> GeneratedSequence:
        """The only sequence of the run.

        Raises:
            ValueError: The run has several.
        """
        if self.expected_count > 1:
            raise ValueError(
                f"the run has {self.expected_count} texts: read run.sequences[i], which has text, token_ids, "
                "values and all else of one"
            )
        if not self.sequences:
            raise ValueError("the run was closed before its first token")
        return self.sequences[0]


def _rows_of(array: Array, axes: Sequence[str]) -> Array:
    """Return a value with its tokens first, and without the dimension of the one text."""
    tokens = axes.index("tokens")
    rows = np.moveaxis(array, tokens, 0)
    if "batch" not in axes:
        return rows
    batch = axes.index("batch")
    return rows.squeeze(batch + 1 if batch < tokens else batch)


def _token(token: pb.GeneratedToken) -> GeneratedToken:
    likely = tuple(LikelyToken(each.token_id, each.text, each.logprob) for each in token.likely)
    return GeneratedToken(
        token.position, token.token_id, token.text, token.logprob, likely, token.prompt, token.sample
    )
