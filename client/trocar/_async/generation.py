"""A run that generates text, with asyncio."""

from __future__ import annotations

from functools import partial
from html import escape
from typing import TYPE_CHECKING

import grpc

from trocar._base.concurrency import async_completed
from trocar._result.generated_view import LOGPROB, sequences_text, sequences_view
from trocar._transport.channel import AsyncInterrupts, new_request_id
from trocar._wire.generation_messages import GenerationAssembler, sampling_of

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from trocar._async.connection import AsyncConnection
    from trocar._base.tensors import Array
    from trocar._result.feature_maps import FeatureMapInfo
    from trocar._result.generated import EditCount, FinishReason, GeneratedSequence, GeneratedToken
    from trocar._result.generated_view import ColourBy
    from trocar._result.likely_tokens import LikelyToken
    from trocar._result.token_view import TokenView
    from trocar._wire.requests import ExtractCall


class AsyncGeneration:
    """A run: its tokens as they come, then its text and values; made by `generate`.

        run = await client.generate("llama", "The capital of France is", taps=["layer[10]"])
        async for token in run:
            print(token.text, end="")
        run.text, run["layer[10]"].shape

    A run of several prompts or samples has its texts in `sequences`; they come one after the other.

    Leave it by iterating to its end, by `finish`, or in a `with` block; the server ends a run that nobody
    reads.

    Attributes:
        model_id: The model.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        request: ExtractCall,
        model_id: str,
        request_id: str,
        timeout_s: float,
        *,
        widens: bool,
        plain: ExtractCall | None = None,
    ) -> None:
        self._open = partial(
            AsyncGeneration, connection, model_id=model_id, timeout_s=timeout_s, widens=widens
        )
        self._plain = plain
        self._baseline: AsyncGeneration | None = None
        self.model_id = model_id
        self._connection = connection
        self._request_id = request_id
        self._assembler = GenerationAssembler(model_id, widens=widens)
        self._call = connection.open(connection.generate, request, request_id, timeout_s)
        self._tokens = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GeneratedToken:
        try:
            return await anext(self._tokens)
        except AsyncInterrupts:
            self._connection.reopen()
            raise

    async def _run(self) -> AsyncGenerator[GeneratedToken, None]:
        try:
            async for message in self._call:
                for token in self._assembler.feed(message):
                    yield token
        except grpc.RpcError as error:
            raise self._connection.converted(error, self._request_id) from None
        finally:
            self._call.cancel()

    async def begin(self) -> Self:
        """Wait until the server has checked the run, or refused it."""
        if self._assembler.options is None:
            try:
                async for message in self._call:
                    self._assembler.feed(message)
                    break
            except grpc.RpcError as error:
                raise self._connection.converted(error, self._request_id) from None
        return self

    async def finish(self) -> Self:
        """Read the run to its end."""
        async for _ in self:
            pass
        return self

    async def close(self) -> None:
        """End the run; the server stops."""
        self._call.cancel()
        await self._tokens.aclose()

    @property
    def is_finished(self) -> bool:
        """Whether the last message was received."""
        return self._assembler.finished is not None

    @property
    def baseline(self) -> AsyncGeneration:
        """The same run without edits; it begins when this is read for the first time."""
        if self._baseline is None:
            own = self._plain
            self._baseline = self if own is None else self._open(request=own, request_id=new_request_id())
        return self._baseline

    @property
    def sequences(self) -> tuple[GeneratedSequence, ...]:
        """The generated texts: in order of prompts, then of samples."""
        async_completed(self)
        return tuple(self._assembler.sequences)

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """The generated tokens of all texts, as they came; `token.prompt` and `token.sample` tell which."""
        async_completed(self)
        return tuple(self._assembler.tokens)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The ids of the tokens of each prompt."""
        return self._assembler.prompts

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids of the tokens of the only prompt."""
        if len(self.prompts) != 1:
            return self._assembler.only.prompt_ids
        return self.prompts[0]

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """What each token of the only prompt adds to the text; see `GeneratedSequence.prompt_texts`."""
        return self._only.prompt_texts

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the generated tokens, with that of the token that ended the text."""
        return self._only.token_ids

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The logarithm of each generated token's probability."""
        return self._only.logprobs

    @property
    def text(self) -> str:
        """The generated text, without the prompt."""
        return self._only.text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended."""
        return self._only.finish_reason

    @property
    def edit_counts(self) -> tuple[EditCount, ...]:
        """For each edit, the positions at which it was applied."""
        return self._only.edit_counts

    @property
    def options(self) -> Mapping[str, object]:
        """How tokens were chosen, by the names of `generate`: as the server used them."""
        return sampling_of(self._assembler.options)

    @property
    def expansions(self) -> Mapping[str, tuple[str, ...]]:
        """The names that each tap's selector became."""
        return self._assembler.expansions

    @property
    def info(self) -> Mapping[str, FeatureMapInfo]:
        """Path, type, port and dtype of each value by name, of the first pass."""
        async_completed(self)
        return self._assembler.info

    def __getitem__(self, name: str) -> Array:
        """Return the rows of a value, one for each computed position: prompt, then generated tokens.

        The last generated token has none: no pass computed it.
        """
        return self._only[name]

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values, in the order of the taps."""
        async_completed(self)
        return tuple(self._assembler.info)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the values to a safetensors file, with the ids of all tokens as `token_ids`.

        Its metadata have the length of the prompt, and the positions of each value's rows as JSON.
        """
        self._only.save(path)

    def positions(self, name: str) -> tuple[int, ...]:
        """Return the position of each row of `run[name]`, from 0 at the start of the prompt."""
        return self._only.positions(name)

    def lens(self, name: str) -> list[tuple[LikelyToken, ...]]:
        """Return what a `trocar.lens(...)` read at each computed position, most likely token first."""
        return self._only.lens(name)

    @property
    def _only(self) -> GeneratedSequence:
        """The only text.

        Raises:
            ValueError: There are several.
        """
        async_completed(self)
        return self._assembler.only

    def show(self, colour_by: ColourBy = LOGPROB, *, positions: Sequence[int] | None = None) -> TokenView:
        """Return the texts with coloured tokens, for a notebook; each prompt comes before its text.

            run.show()                                   # by log-probability
            run.show("lens:layer[10]")                   # by what a lens gave each token, one position before
            run.show(np.linalg.norm(run["layer[10]"], axis=-1))

        The texts of `run.baseline` are beside them once it was read.

        Args:
            colour_by: "logprob"; "lens:" with the name of a `trocar.lens(...)` among the taps; for the only
                text an array of one number for each position; None for no colours.
            positions: The positions of the numbers of an array, as `positions(name)` returns them; when None
                they begin at 0 and end at the last token, or at the one before, which has no values.

        Raises:
            KeyError: No lens has this name.
            ValueError: `colour_by` is another word, or not one number for each position; or the run has
                several texts, and numbers.
        """
        async_completed(self)
        return self._view(colour_by, positions)

    def _view(self, colour_by: ColourBy, positions: Sequence[int] | None = None) -> TokenView:
        other = self._baseline if self._baseline is not self else None
        plain = None if other is None or not other._assembler.sequences else other._assembler.sequences
        return sequences_view(self._assembler.sequences, plain, colour_by, positions)

    def _repr_html_(self) -> str:
        """Show the tokens that were read in a notebook, coloured by log-probability; reads no others."""
        if not self._assembler.sequences:
            return f"<p>{escape(repr(self))}</p>"
        return self._view(LOGPROB)._repr_html_()

    def as_inputs(self) -> list[list[int]]:
        """Return prompt and generated tokens of each text as inputs, for `extract` or `gradients`."""
        return [ids for sequence in self.sequences for ids in sequence.as_inputs()]

    def __str__(self) -> str:
        """Return the generated text, as far as it was read."""
        return sequences_text(self._assembler.sequences) if self._assembler.sequences else repr(self)

    def __repr__(self) -> str:
        count, state = len(self._assembler.tokens), "" if self.is_finished else " so far; finish() reads it"
        state = f"{count} tokens{state}"
        return f"<{type(self).__name__} of {self.model_id!r}: {state}>"
