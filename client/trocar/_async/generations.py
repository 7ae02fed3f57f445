"""Generation of text with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._async.generation import AsyncGeneration
from trocar._base.call_options import over
from trocar._request.execution import Execution
from trocar._request.surgery import make_surgery
from trocar._transport.channel import new_request_id
from trocar._wire.generation_messages import SamplingOptions, generate_call
from trocar._wire.requests import extract_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._base.call_options import CallOptions
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.taps import Tap
    from trocar._request.text_positions import Gate
    from trocar._wire.generation_messages import Sampling
    from trocar._wire.requests import ExtractCall


class AsyncGenerations:
    """Generation of text over one connection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def generate(  # noqa: PLR0913 - options of one run, by keyword
        self,
        model_id: str,
        prompt: Inputs,
        *,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        n: int = 1,
        sample_index: int = 0,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        stop_when: Gate | None = None,
        logprobs: int = 0,
        taps: str | Tap | Sequence[str | Tap] = (),
        edits: str | Edit | Sequence[str | Edit] = (),
        adapter: str = "",
        options: CallOptions | None = None,
    ) -> AsyncGeneration:
        """Generate the texts that follow prompts.

            run = await client.generate("llama", "The capital of France is", taps=["layer[10]"])
            async for token in run:
                print(token.text, end="")
            run["layer[10]"]                 # numpy array (positions, width)

        Each text is computed alone, with a cache of keys and values: logits, and so greedy tokens, have the
        bits of `transformers.generate`. The value at a position is what the model computes from the token
        there; its logits choose the next token. The last generated token has no values.

        Several prompts, and several samples, are computed one after the other, and come in this order:

            run = await client.generate("llama", ["one", "another"], n=2, temperature=1.0)
            async for token in run:
                print(token.prompt, token.sample, token.text)
            [sequence.text for sequence in run.sequences]       # of prompts 0, 0, 1, 1

        Args:
            model_id: The id of a loaded causal language model.
            prompt: A text, a chat (`trocar.chat`), or token ids: a list of them. For several prompts a list
                of these, or an array of whole numbers (prompts, tokens); at most 1,024 with all samples.
            max_new_tokens: The most generated tokens, at least 1.
            temperature: Divides the logits before a token is drawn; 0, and None, take the most likely token.
            top_k: The number of most likely tokens to draw from; all when None.
            top_p: The probability that the tokens to draw from come to at least; all when None.
            min_p: The least probability of a token to draw from, as a share of the largest; all when None.
            repetition_penalty: Divides positive logits of tokens that are in the text, and multiplies
                negative ones; 1 when None.
            presence_penalty: Subtracted from the logits of tokens that were generated before; 0 when None.
            logit_bias: Added to the logits, by token id.
            seed: Of the drawn tokens: the same gives the same text. Each text has random numbers of its own,
                by the seed and the indices of its prompt and sample.
            n: The number of samples of each prompt.
            sample_index: The index of the first of them: sample i of `n` is the one of `sample_index=i`.
            sampling: "model" takes what is None of temperature, `top_k`, `top_p`, `min_p` and
                `repetition_penalty` from the model's generation configuration, as transformers does.
            stop: Texts that end the generated text, which is then without them.
            stop_token_ids: Tokens that end it; the model's own when None, none when empty.
            stop_when: A `trocar.gate(...)` that ends each text. Every pass reads it at the position whose
                logits choose the next token: at the last token of the prompt, then at each generated one.
                Where it is open, the token chosen there is the last of the text, and `finish_reason` is
                "gate", unless a stop token or string ends the text there, too. It reads what a
                `trocar.readout` at its place reads, behind edits that come before it in the pass.
            logprobs: How many of the most likely tokens `token.likely` has.
            taps: Selectors, or `tap(...)` with a `cast`, of values with a dimension of tokens: their rows at
                each computed position.
            edits: Changes in each pass, as in `extract`: at every position, once.
            adapter: As in `extract`.
            options: As in `extract`; `timeout_s` is that of the whole run. Runs are exact, and never cached.

        Returns:
            The run. Its tokens come when it is iterated. `run.baseline` is the same without edits;
            `run.options` are those that the server used.

        Raises:
            InvalidArgumentError: The model cannot generate, the prompt and `max_new_tokens` exceed its
                positions, a tap or the gate has no dimension of tokens, an option is out of range, or the
                model's generation configuration has one that is not supported.
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: The model is not in memory; see `load`.
            SelectorError: A selector is wrong; see its subclasses.
            UnknownDirectionError: You have no direction of the gate's name.
            DirectionMismatchError: The gate's direction has several vectors, is not of its place, or the
                model has changed since it was fitted.
            EditError: An edit does not fit; see its subclasses.
            InputError: The prompt is wrong; see its subclasses.
            RequestTooLargeError: The prompt exceeds a limit of the server.
            PassTooLargeError: The pass of the prompt, or the keys and values of the text, would not fit.
            ServerBusyError: No replica was free in time.
            ValueError: An option cannot be sent.
        """
        sampled = SamplingOptions(
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            logit_bias or {},
            seed,
            stop,
            stop_token_ids,
            logprobs,
            n,
            sample_index,
            sampling,
            stop_when,
        )
        defaults = self._connection.options.calls
        how = defaults if options is None else over(options, defaults)
        execution = Execution(priority=how.priority or "normal")

        def request(changes: str | Edit | Sequence[str | Edit]) -> ExtractCall:
            own = extract_call(
                model_id,
                prompt,
                taps,
                how.chunk_bytes,
                surgery=make_surgery(changes),
                execution=execution,
                wire=how.wire,
                adapter=adapter,
            )
            return generate_call(own, sampled)

        run = AsyncGeneration(
            self._connection,
            request(edits),
            model_id,
            new_request_id(),
            self._connection.timeout(how.timeout_s),
            widens=how.wire is not None,
            plain=request(()) if edits else None,
        )
        return await run.begin()
