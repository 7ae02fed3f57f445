"""Token targets: labels of the tokens of a batch of texts that the server tokenized.

# Note: [Labels of words]
Labels of words and of spans go to the first token of each word; special tokens and a word's other tokens get
`ignore_index`. This is the recipe of transformers' guide to token classification
(https://huggingface.co/docs/transformers/tasks/token_classification).

As in its script `run_ner.py`, `label_all_tokens` gives a word's other tokens the word's class, and `b_to_i`,
the class of I- for each class, gives them that. Of a span, the words behind its first get `b_to_i` as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import (
    ProcessedInput,
    ProcessedSample,
    ProcessorInput,
    TextEntry,
    TextInput,
)
from trocar_server.tensors.losses import LOSSES
from trocar_server.training.spec.trainer_spec import LossSpec

LEFT_OUT = -100
"""torch's own `ignore_index`."""

OUTSIDE = 0
"""The class of words without a character of a span."""


@dataclass(frozen=True)
class TokenLayout:
    """Layout of the tokens of a batch: samples of different lengths, padded to one.

    Attributes:
        argument: The name of the argument that holds the token ids.
        entries: The texts, as they were sent.
        samples: Their tokens.
        padded_length: Tokens of each sample with padding.
        pads_left: Whether padding comes first.
        is_cut: Whether longer texts were cut.
    """

    argument: str
    entries: tuple[TextEntry, ...]
    samples: tuple[ProcessedSample, ...]
    padded_length: int
    pads_left: bool
    is_cut: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(sample.length for sample in self.samples)

    def span(self, length: int) -> slice:
        """Return where the tokens of a sample are."""
        return slice(self.padded_length - length, None) if self.pads_left else slice(0, length)


def token_layout(processed: Sequence[ProcessedInput], given: Sequence[ProcessorInput]) -> TokenLayout | None:
    """Return the layout of the texts that losses refer to, the decoder's if there are any; None without.

    Args:
        processed: What the processor made of them.
        given: The texts, and sound.
    """
    pairs = zip(given, processed, strict=True)
    texts = [(one, made) for one, made in pairs if isinstance(one, TextInput)]
    if not texts:
        return None
    one, made = max(texts, key=lambda pair: bool(pair[0].name))
    argument = next(name for name in made.arguments if name.endswith("input_ids"))
    is_cut = one.options.truncate
    return TokenLayout(argument, one.entries, made.samples, made.padded_length, made.pads_left, is_cut)


def with_token_labels(
    losses: Sequence[LossSpec],
    targets: Mapping[str, Tensor],
    arguments: Mapping[str, object],
    layout: TokenLayout,
) -> dict[str, Tensor]:
    """Lay labels of tokens out as the tokens are, and label the tokens of causal losses with themselves.

    See Note: [Labels of words].

    Args:
        losses: The terms of the loss.
        targets: The given targets by name; labels of tokens, and of the words of samples that are words,
            (batch, any); spans (batch, any, 3): first character, the one behind the last, and class.
        arguments: Keyword arguments of the pass, token ids (batch, tokens) among them.
        layout: Their layout.

    Raises:
        ServiceError: `TARGET_REJECTED`, there are not as many labels as tokens or words, or a span is not in
            its text.
    """
    token_labels, ids = dict(targets), arguments[layout.argument]
    assert isinstance(ids, Tensor)  # as every argument that a tokenizer makes
    for spec in losses:
        if not LOSSES[spec.name].of_tokens or spec.teacher is not None:
            continue
        name = spec.target if spec.target in targets or len(targets) != 1 else next(iter(targets))
        if name in targets:
            token_labels[name] = _laid_out(targets[name], layout, spec)
        elif spec.name == "causal_lm" and (spec.target or not targets):
            token_labels[name] = _counted(ids, layout, ignore_index(spec))
    return token_labels


def ignore_index(spec: LossSpec) -> int:
    """Return the label that a loss leaves out."""
    ignored = spec.options.get("ignore_index", LEFT_OUT)
    return int(ignored) if isinstance(ignored, int) else LEFT_OUT


def _counted(ids: Tensor, layout: TokenLayout, ignored: int) -> Tensor:
    labels = ids.new_full(ids.shape, ignored)
    for row, own, length in zip(labels, ids, layout.lengths, strict=True):
        row[layout.span(length)] = own[layout.span(length)]
    return labels


def _laid_out(labels: Tensor, layout: TokenLayout, spec: LossSpec) -> Tensor:
    """Return labels (batch, tokens); what is not labels of tokens as it is, for the loss to refuse."""
    are_spans = labels.ndim == 3 and labels.shape[2] == 3
    is_known = (labels.ndim == 2 or are_spans) and not labels.is_floating_point()
    if not is_known or len(labels) != len(layout.samples):
        return labels
    labels, ignored = labels.to(torch.int64), ignore_index(spec)
    laid_out = labels.new_full((len(labels), layout.padded_length), ignored)
    for index, (row, own) in enumerate(zip(laid_out, labels, strict=True)):
        sample = _Sample(index, layout.entries[index], layout.samples[index], ignored, _following(spec))
        if are_spans:
            of_tokens = sample.of_words(sample.of_spans(own.tolist()))
        elif sample.entry.kind == "words":
            of_tokens = sample.of_words(sample.given(own, len(sample.entry.content), "word"))
        else:
            of_tokens = sample.given(own, sample.made.length, "token", is_cut=layout.is_cut)
        row[layout.span(sample.made.length)] = row.new_tensor(of_tokens)
    return laid_out


@dataclass(frozen=True)
class _Sample:
    """One text.

    Attributes:
        index: Its position in the batch.
        entry: As it was sent.
        made: Its tokens.
        ignored: The label that the loss leaves out.
        following: What the tokens of a word behind its first get.
    """

    index: int
    entry: TextEntry
    made: ProcessedSample
    ignored: int
    following: _Following

    def given(self, labels: Tensor, count: int, what: str, *, is_cut: bool = False) -> list[int]:
        """Return a label for each token or word.

        Raises:
            ServiceError: `TARGET_REJECTED`, there are more or fewer.
        """
        rest = labels[count:]
        is_over = not is_cut and bool(((rest != LEFT_OUT) & (rest != self.ignored)).any())
        if len(labels) < count or is_over:
            counted = (labels != LEFT_OUT).nonzero()
            result = int(counted[-1]) + 1 if len(counted) else len(labels)
            specials = ", special tokens included," if what == "token" else ""
            raise self.rejected(
                f"has {count} {what}s and labels for {result}; give one for each {what}{specials} and "
                f"{LEFT_OUT} where none counts"
            )
        return labels[:count].masked_fill(labels[:count] == LEFT_OUT, self.ignored).tolist()

    def of_words(self, labels: Sequence[int]) -> list[int]:
        """Return a label for each token, of labels of the words of the first text.

        Raises:
            ServiceError: `TARGET_REJECTED`, the tokenizer does not tell words.
        """
        words = self._words()
        return [self._of_token(labels, words, place) for place in range(len(words))]

    def _of_token(self, labels: Sequence[int], words: Sequence[int], place: int) -> int:
        word = words[place]
        if word < 0:
            return self.ignored
        is_first = place == 0 or words[place - 1] != word
        return labels[word] if is_first else self._left_out(self.following.of_token(labels[word]))

    def _left_out(self, label: int) -> int:
        return self.ignored if label == LEFT_OUT else label

    def of_spans(self, spans: Sequence[Sequence[int]]) -> list[int]:
        """Return a label for each word: the class of the first span with a character of it.

        With `b_to_i`, the words behind the first of a span have the class of I-.

        Raises:
            ServiceError: `TARGET_REJECTED`, a span is not in the text, or the text has no characters.
        """
        wanted = [span for span in spans if any(each != LEFT_OUT for each in span)]
        self._check_spans(wanted)
        ranges: dict[int, tuple[int, int]] = {}
        for place, word in enumerate(self._words()):
            if word >= 0:
                start, end = self.made.starts[place], self.made.ends[place]
                ranges[word] = (min(start, ranges.get(word, (start, end))[0]), end)
        result = [_span_at(*ranges.get(word, (0, 0)), wanted) for word in range(max(ranges, default=-1) + 1)]
        return [
            self._left_out(self.following.of_word(int(span[2])))
            if word and span is not _NO_SPAN and result[word - 1] is span
            else span[2]
            for word, span in enumerate(result)
        ]

    def _words(self) -> list[int]:
        """Return the word of each token; -1 for special tokens and for the second text of a pair."""
        if not self.made.words:
            what = (
                "was sent as token ids" if self.entry.kind == "ids" else "has a tokenizer that tells no words"
            )
            raise self.rejected(f"{what}; give a label for each token")
        texts = self.made.texts or (0,) * self.made.length
        return [word if text == 0 else -1 for word, text in zip(self.made.words, texts, strict=True)]

    def _check_spans(self, spans: Sequence[Sequence[int]]) -> None:
        if self.entry.kind == "ids":
            raise self.rejected("has spans for labels, which are for texts, pairs, words and chats")
        first = self._first_text()
        for start, stop, label in spans:
            if not 0 <= start < stop <= len(first):
                raise self.rejected(f"has {len(first)} characters and a label for {start} to {stop}")
            if label < 0 and label != self.ignored:
                raise self.rejected(f"has the class {label} for characters {start} to {stop}")

    def _first_text(self) -> str:
        """Return the text whose characters the tokenizer counts: rendered, if it was."""
        content = self.entry.content
        if self.made.rendered or self.entry.kind == "chat":
            return self.made.rendered
        if self.entry.kind == "pair":
            return str(content[0])
        return content if isinstance(content, str) else " ".join(map(str, content))

    def rejected(self, problem: str) -> ServiceError:
        """Build the error about this text."""
        message = f"text {self.index} {problem}"
        return ServiceError(ErrorReason.TARGET_REJECTED, message, sample=str(self.index))


_NO_SPAN = (0, 0, OUTSIDE)


def _span_at(start: int, end: int, spans: Sequence[Sequence[int]]) -> Sequence[int]:
    return next((span for span in spans if span[0] < end and start < span[1]), _NO_SPAN)


@dataclass(frozen=True)
class _Following:
    """Labels of what follows a labelled token.

    Attributes:
        label_all_tokens: Whether a word's other tokens have its class.
        b_to_i: The class of I- for each class; none without.
    """

    label_all_tokens: bool
    b_to_i: tuple[int, ...]

    def of_token(self, label: int) -> int:
        """Return the label of a word's other tokens; `LEFT_OUT` for none."""
        if self.b_to_i:
            return self.of_word(label)
        return label if self.label_all_tokens else LEFT_OUT

    def of_word(self, label: int) -> int:
        """Return the label of the words behind the first of a span."""
        return self.b_to_i[label] if 0 <= label < len(self.b_to_i) else label


def _following(spec: LossSpec) -> _Following:
    b_to_i = spec.options.get("b_to_i")
    classes = tuple(map(int, b_to_i)) if isinstance(b_to_i, list) else ()
    return _Following(spec.options.get("label_all_tokens") is True, classes)
