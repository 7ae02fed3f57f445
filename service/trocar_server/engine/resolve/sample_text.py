"""Sample text: one text that the server tokenized, and the tokens that hold its characters."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import ProcessedSample, TextEntry
from trocar_server.tensors.reductions import TextSpan

_Range = tuple[int, int]


@dataclass(frozen=True)
class SampleText:
    """One text of a batch, without padding.

    Attributes:
        index: Its position in the batch.
        entry: As it was sent.
        made: Its tokens.
    """

    index: int
    entry: TextEntry
    made: ProcessedSample

    @property
    def ids(self) -> Sequence[int]:
        """The ids of its tokens."""
        return self.made.token_ids

    @property
    def count(self) -> int:
        """The number of its tokens."""
        return self.made.length

    def find(self, span: TextSpan, *, must_occur: bool = True) -> list[int]:
        """Return the tokens that hold a character of a span.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the text has no such spans, or it does not occur.
        """
        places, ranges = self._find(span)
        if must_occur and not any(ranges):
            raise self._refuse(span, self._without(span, self._texts()))
        if must_occur and not places:
            raise self._refuse(span, "none of its tokens contains one of these characters")
        return places

    def _find(self, span: TextSpan) -> tuple[list[int], list[list[_Range]]]:
        """Return the tokens of a span, and its characters in each text of the sample."""
        if self.entry.kind == "ids":
            raise self._refuse(span, "it was sent as token ids, which have no characters")
        if not self.made.starts:
            raise self._refuse(span, "the model's tokenizer does not report which characters a token covers")
        ranges = [self._ranges(span, text, which) for which, text in enumerate(self._texts())]
        places = [
            place
            for place, is_special in enumerate(self.made.is_special)
            if not is_special and self._is_in(ranges[self._text_of(place)], place)
        ]
        return places, ranges

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
        message = f"{span} of text {self.index}: {problem}"
        return ServiceError(ErrorReason.REDUCTION_REJECTED, message, sample=str(self.index))


def _occurrences(wanted: str, text: str) -> Iterator[_Range]:
    start = text.find(wanted)
    while start >= 0:
        yield start, start + len(wanted)
        start = text.find(wanted, start + 1)
