"""Sampling: which token follows, from the logits of the last position. Touches tensors: owner thread only."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.generate.stop_gate import StopGate
from trocar_server.errors import ServiceError

MAX_LOGPROBS = 1024
"""The most likely tokens that are reported for one generated token."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when the text ends; see `GenerationOptions` of the wire.

    Attributes:
        max_new_tokens: The most generated tokens.
        temperature: Divides the logits; 0, and None, take the most likely token.
        top_k: The number of most likely tokens to draw from; None for all.
        top_p: The probability that the tokens to draw from come to at least; None for all.
        min_p: The least probability of a token to draw from, as a share of the largest; None for all.
        repetition_penalty: Of tokens in the text; 1 when None.
        presence_penalty: Of generated tokens.
        logit_bias: Added, by token id.
        seed: Of the draws.
        stop_token_ids: Tokens that end the text; the model's own when None.
        stop: Texts that end the text.
        stop_when: A gate that ends the text; None for none.
        logprobs: The number of most likely tokens to report.
        sample_count: The samples of each prompt.
        sample_index: The index of the first of them.
        is_of_model: Whether what is None is as the model's generation configuration has it; see
            `model_sampling`.
    """

    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    sample_count: int = 1
    sample_index: int = 0
    is_of_model: bool = False
    stop_when: StopGate | None = None

    @property
    def filled(self) -> "Sampling":
        """The same without None where it stands for a number."""
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return replace(self, temperature=self.temperature or 0.0, repetition_penalty=penalty)


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    Attributes:
        token_id: Its id.
        logprob: The logarithm of its probability by the logits alone.
        likely: Ids and logarithms of the most likely tokens, most likely first.
    """

    token_id: int
    logprob: float
    likely: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence, with random numbers of its own.

        sampler = Sampler(sampling, device)
        choice = sampler.choose(logits, prompt_ids, generated_ids)

    Args:
        sampling: How.
        device: Of the logits.
        prompt: The index of the prompt in its run.
        sample: The index of the sample.
    """

    def __init__(self, sampling: Sampling, device: torch.device, prompt: int = 0, sample: int = 0) -> None:
        self._sampling = sampling
        seed = sequence_seed(sampling.seed, prompt, sample)
        self._generator = torch.Generator(device).manual_seed(seed)

    def choose(self, logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Choice:
        """Return the token that follows.

        Args:
            logits: float32 (vocabulary,), of the last position.
            prompt: The ids of the prompt.
            generated: The ids of the tokens before this one.

        Raises:
            ServiceError: `NON_FINITE_VALUE`, the logits have NaN or infinity, so that no token follows.
        """
        logprobs = logits.log_softmax(-1)
        if bool(logprobs[0].isnan()):  # one NaN, or infinity, makes all of them NaN
            position = len(prompt) + len(generated) - 1
            raise ServiceError(
                ErrorReason.NON_FINITE_VALUE,
                f"the logits at position {position:,} are not finite, so no token follows; weaken the edits, "
                "or load the model in another dtype",
            )
        token_id = self._token(self._changed(logits, prompt, generated))
        likely: tuple[tuple[int, float], ...] = ()
        if self._sampling.logprobs:
            top = logprobs.topk(min(self._sampling.logprobs, len(logprobs)))
            likely = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Choice(token_id, float(logprobs[token_id]), likely)

    def _token(self, logits: torch.Tensor) -> int:
        if not self._sampling.temperature:
            return int(logits.argmax())
        probabilities = self._filtered(logits / self._sampling.temperature).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _changed(self, logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        """Return logits after bias and penalties; in the order of transformers."""
        sampling = self._sampling
        if sampling.logit_bias:
            logits = logits.clone()
            logits[list(sampling.logit_bias)] += torch.tensor(
                list(sampling.logit_bias.values()), device=logits.device
            )
        penalty = sampling.repetition_penalty
        if penalty is not None and penalty != 1.0:
            seen = torch.tensor(sorted({*prompt, *generated}), device=logits.device)
            own = logits[seen]
            logits = logits.index_put((seen,), torch.where(own < 0, own * penalty, own / penalty))
        if sampling.presence_penalty and generated:
            logits = logits.clone()
            logits[sorted(set(generated))] -= sampling.presence_penalty
        return logits

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with -inf for tokens that are not drawn from; in the order of transformers."""
        sampling = self._sampling
        if sampling.top_k is not None:
            least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if sampling.top_p is not None and sampling.top_p < 1.0:
            ascending, order = logits.sort()
            is_out = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
            is_out[-1] = False
            logits = logits.index_fill(0, order[is_out], -torch.inf)
        if sampling.min_p is not None:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
        return logits


def sequence_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of one sequence's random numbers.

    The first eight bytes of the SHA-256 of the three numbers as little-endian 64-bit integers, without the
    highest bit: sequences with neighbouring indices or seeds have nothing in common.
    """
    digest = hashlib.sha256(struct.pack("<3Q", seed, prompt, sample)).digest()
    number: int = struct.unpack("<Q", digest[:8])[0]
    return number >> 1
