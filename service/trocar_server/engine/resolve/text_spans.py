"""Text spans: tokens that taps, edits and objectives select by characters, words or the roles of a chat.

    plan = with_token_rows(plan, unprocessed, made)

Once the texts are tokenized, `Spans` become `TokenRows`, so everything behind knows the size of each value.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.objective import GradientPenalty, Objective, Score, Term, ValueScore
from trocar_server.engine.request.plan import EditRequest, Plan
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import (
    ProcessedInput,
    ProcessedSample,
    ProcessorInput,
    TextEntry,
    TextInput,
)
from trocar_server.tensors.reductions import Reduction, Spans, TextSpan, TokenRows

_Range = tuple[int, int]
_Resolve = Callable[[Reduction], Reduction]


def has_spans(plan: Plan) -> bool:
    """Whether a tap, an edit or the objective of a plan selects tokens by where they are in their text."""
    return next(_spans(plan), None) is not None


def refuse_spans(plan: Plan) -> None:
    """Refuse a plan that still has spans: its inputs are not texts.

    Raises:
        ServiceError: `REDUCTION_REJECTED`.
    """
    if (span := next(_spans(plan), None)) is not None:
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED,
            f"{span}: only texts that the server tokenizes have characters; send texts, or give positions",
        )


def with_token_rows(
    plan: Plan, unprocessed: Sequence[ProcessorInput], made: Sequence[ProcessedInput]
) -> Plan:
    """Return a plan whose spans are positions in its texts; without texts, as it is.

    Args:
        plan: The plan.
        unprocessed: Its texts and sound, as they were sent.
        made: What the processor made of each of them.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, or of an edit `EDIT_NOT_POSSIBLE`: a span has no token, there are
            not as many spans as texts, or no texts of the decoder.
    """
    pairs = zip(unprocessed, made, strict=True)
    found = [(given, done) for given, done in pairs if isinstance(given, TextInput)]
    if not found:
        return plan

    def resolve(reduction: Reduction) -> Reduction:
        return (
            _token_rows(reduction, *_texts_of(reduction, found))
            if isinstance(reduction, Spans)
            else reduction
        )

    taps = tuple(replace(tap, reductions=tuple(map(resolve, tap.reductions))) for tap in plan.taps)
    objective = None if plan.objective is None else _objective(plan.objective, resolve)
    edits = tuple(_edit(position, request, resolve) for position, request in enumerate(plan.edits))
    return replace(plan, taps=taps, edits=edits, objective=objective)


def _spans(plan: Plan) -> Iterator[Spans]:
    of_edits = (request.edit.region.tokens for request in plan.edits)
    yield from (entry for entry in (*_reductions(plan), *of_edits) if isinstance(entry, Spans))


def _reductions(plan: Plan) -> Iterator[Reduction]:
    for tap in plan.taps:
        yield from tap.reductions
    if plan.objective is not None:
        yield from _of_objective(plan.objective)


def _edit(position: int, request: EditRequest, resolve: _Resolve) -> EditRequest:
    region = request.edit.region
    if region.tokens is None:
        return request
    try:
        tokens = resolve(region.tokens)
    except ServiceError as error:
        message = f"edits[{position}] at '{request.selector.text}': {error.message}"
        raise ServiceError(ErrorReason.EDIT_NOT_POSSIBLE, message, **error.details) from None
    assert isinstance(tokens, TokenRows)
    return replace(request, edit=replace(request.edit, region=replace(region, tokens=tokens)))


def _texts_of(
    wanted: Spans, given: Sequence[tuple[TextInput, ProcessedInput]]
) -> tuple[TextInput, ProcessedInput]:
    """Return the texts that spans are of: the decoder's own have a name."""
    own = [pair for pair in given if bool(pair[0].name) == wanted.is_decoder]
    if not own and wanted.is_decoder:
        raise _rejected(f"{wanted} of the decoder: no texts of the decoder were sent; call them decoder_text")
    return (own or given)[0]


def _of_objective(objective: Objective) -> Iterator[Reduction]:
    for term in objective.terms:
        if isinstance(term.score, ValueScore):
            yield from term.score.reductions
        elif isinstance(term.score, GradientPenalty):
            yield from _of_objective(term.score.of)


def _objective(objective: Objective, resolve: _Resolve) -> Objective:
    return Objective(tuple(Term(term.weight, _score(term.score, resolve)) for term in objective.terms))


def _score(score: Score, resolve: _Resolve) -> Score:
    if isinstance(score, ValueScore):
        return replace(score, reductions=tuple(map(resolve, score.reductions)))
    if isinstance(score, GradientPenalty):
        return replace(score, of=_objective(score.of, resolve))
    return score


def _token_rows(wanted: Spans, texts: TextInput, processed: ProcessedInput) -> TokenRows:
    count, length = len(processed.samples), processed.padded_length
    if len(wanted.spans) not in (1, count):
        raise _rejected(f"{len(wanted.spans)} spans for {count} texts; give one for all, or one for each")
    spans = wanted.spans * count if len(wanted.spans) == 1 else wanted.spans
    first = tuple(length - each.length if processed.pads_left else 0 for each in processed.samples)
    rows = []
    for index, span in enumerate(spans):
        sample = _SampleText(index, texts.entries[index], processed.samples[index])
        rows.append(tuple(first[index] + place for place in sample.places(span)))
    return TokenRows(tuple(rows), length, first)


@dataclass(frozen=True)
class _SampleText:
    """One sample of the texts.

    Attributes:
        index: Its position in the batch.
        entry: As it was sent.
        made: Its tokens.
    """

    index: int
    entry: TextEntry
    made: ProcessedSample

    def places(self, span: TextSpan) -> list[int]:
        """Return the tokens that hold a character of a span.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, there is none.
        """
        if self.entry.kind == "ids":
            raise self._refuse(span, "it was sent as token ids, which have no characters")
        if not self.made.starts:
            raise self._refuse(span, "the model's tokenizer does not report which characters a token covers")
        texts = self._texts()
        ranges = [self._ranges(span, text, which) for which, text in enumerate(texts)]
        if not any(ranges):
            raise self._refuse(span, self._without(span, texts))
        found = [
            place
            for place, is_special in enumerate(self.made.is_special)
            if not is_special and self._is_in(ranges[self._text_of(place)], place)
        ]
        if not found:
            raise self._refuse(span, "none of its tokens contains one of these characters")
        return found

    def _texts(self) -> tuple[str, ...]:
        if self.made.rendered or self.entry.kind == "chat":
            return (self.made.rendered,)
        if self.entry.kind == "words":
            return (" ".join(map(str, self.entry.content)),)
        return tuple(map(str, (self.entry.content,) if self.entry.kind == "text" else self.entry.content))

    def _text_of(self, place: int) -> int:
        return max(self.made.texts[place], 0) if self.made.texts else 0

    def _is_in(self, ranges: list[_Range], place: int) -> bool:
        """Whether a token overlaps one of these ranges, which are in order of both their ends."""
        after = bisect_left(ranges, self.made.ends[place], key=lambda each: each[0])  # those begin behind it
        return after > 0 and ranges[after - 1][1] > self.made.starts[place]

    def _ranges(self, span: TextSpan, text: str, which: int) -> list[_Range]:
        if span.characters is not None:
            start, stop = span.characters
            return [(start, stop)] if which == 0 and start < len(text) else []
        if span.text:
            return list(_occurrences(span.text, text))
        contents = self._contents(span)
        return [(start, stop) for role, start, stop in contents if role == span.role and start < stop]

    def _contents(self, span: TextSpan) -> tuple[tuple[str, int, int], ...]:
        if self.entry.kind != "chat":
            raise self._refuse(span, "it is not a chat, so it has no roles")
        if self.made.contents is None:
            raise self._refuse(
                span,
                "the chat template changes the messages, so their contents cannot be found in its "
                "output; give character positions",
            )
        return self.made.contents

    def _without(self, span: TextSpan, texts: Sequence[str]) -> str:
        if span.role:
            roles = ", ".join(dict.fromkeys(role for role, _, _ in self.made.contents or ()))
            return f"no message with text has this role; the roles are {roles}"
        if span.text:
            return f"the text is not in it; it begins '{texts[0][:80]}'"
        return f"it has {len(texts[0]):,} characters"

    def _refuse(self, span: TextSpan, problem: str) -> ServiceError:
        return _rejected(f"{span} of text {self.index}: {problem}", sample=str(self.index))


def _occurrences(wanted: str, text: str) -> Iterator[_Range]:
    start = text.find(wanted)
    while start >= 0:
        yield start, start + len(wanted)
        start = text.find(wanted, start + 1)


def _rejected(problem: str, **metadata: str) -> ServiceError:
    return ServiceError(ErrorReason.REDUCTION_REJECTED, problem, **metadata)
