"""Texts and sound as inputs: for models with a tokenizer or a feature extractor, which the server runs.

client.extract("mini", ["a sentence", "another one"], ["encoder.layer.3"])
client.extract("mini", trocar.texts(["a long one"], truncate=True), ["encoder.layer.3"])
client.extract("chatty", trocar.chat([{"role": "user", "content": "hello"}]), ["model.layers.3"])
client.extract("qwen", trocar.chat([{"role": "user", "content": [image, "what is it?"]}]), ["hidden[3]"])
client.extract("whisper", trocar.audio(samples, 16_000), ["encoder.layers.3"])
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from trocar._base.delegation import explained
from trocar._base.input_kinds import exists
from trocar._base.tensors import Array, flat_bytes, float_array, is_array
from trocar._request.chats import NOT_SENT, chat_entry, refuse_missing_images
from trocar.errors import EmptyBatchError
from trocar_api.v1 import extraction_pb2 as pb

TextSample: TypeAlias = str | tuple[str, str] | Sequence[int] | NDArray[np.integer[Any]] | Sequence[str]
ChatMessages: TypeAlias = Sequence[Mapping[str, Any] | tuple[str, Any]]
"""Messages, as `{"role": ..., "content": ...}` or (role, content), with a text or a list of parts."""

_FILE_NAME = re.compile(r"\S+\.[A-Za-z0-9]{1,5}|\S*[/\\]\S*")
_MAX_NAME = 255
_SOUND = (".wav", ".flac")


@dataclass(frozen=True)
class Texts:
    """A batch of texts with options; `texts` and `chat` make it."""

    entries: tuple[pb.TextEntry, ...]
    """One for each sample."""
    max_tokens: int | None = None
    """The most tokens of one sample."""
    truncate: bool = False
    """Whether longer samples are cut."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens."""
    template: str = ""
    """The name of the chat template."""
    add_generation_prompt: bool = False
    """Whether the tokens that begin an answer follow a chat."""
    images: tuple[tuple[Any, ...], ...] = ()
    """The images within each chat; empty without any."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def own_images(self) -> list[Any]:
        """The images within the chats, in order; empty where they are sent beside these."""
        return [image for own in self.images for image in own if image is not NOT_SENT]

    def part(self, start: int, end: int) -> "Texts":
        """Return the samples from a start to before an end, with the same options."""
        return replace(self, entries=self.entries[start:end], images=self.images[start:end])

    def label(self, position: int) -> str:
        """Name the sample at a position by its text; empty for token ids and conversations."""
        entry = self.entries[position]
        if entry.HasField("pair"):
            return f"{entry.pair.first} | {entry.pair.second}"
        if entry.HasField("words"):
            return " ".join(entry.words.words)
        return entry.text

    def to_wire(self) -> tuple[pb.Input, list[memoryview]]:
        """Return the message; there are no payloads."""
        batch = pb.TextBatch(
            entries=self.entries,
            max_tokens=self.max_tokens,
            truncate=self.truncate,
            template=self.template,
            add_generation_prompt=self.add_generation_prompt,
        )
        if not self.add_special_tokens:
            batch.add_special_tokens = False
        return pb.Input(texts=batch), []


@dataclass(frozen=True, eq=False)
class Audio:
    """A batch of sound; `audio` makes it."""

    clips: tuple[tuple[pb.AudioClip, memoryview], ...]
    """Description and bytes of each clip."""

    def __len__(self) -> int:
        return len(self.clips)

    def part(self, start: int, end: int) -> "Audio":
        """Return the clips from a start to before an end."""
        return Audio(self.clips[start:end])

    def to_wire(self) -> tuple[pb.Input, list[memoryview]]:
        """Return the message and the payloads."""
        batch = pb.AudioBatch(clips=[clip for clip, _ in self.clips])
        return pb.Input(audio=batch), [payload for _, payload in self.clips]


@explained
def texts(
    samples: TextSample | Sequence[TextSample],
    *,
    max_tokens: int | None = None,
    truncate: bool = False,
    add_special_tokens: bool = True,
) -> Texts:
    """Return texts as an input, with options; the server tokenizes and pads them.

        client.extract("mini", trocar.texts(long_texts, truncate=True), ["encoder.layer.3"])

    You can also pass a plain string or list of strings as an input. Strings that look like a file name are
    then read as files; this function never does that.

    Args:
        samples: A text, a pair of texts as a tuple, the ids of tokens as a list, or a list of these. In a
            list, also texts that are split into words already, a list of strings each.
        max_tokens: The maximum number of tokens of one sample; the model's maximum when None.
        truncate: Whether longer samples are cut, in a sentence-transformers folder at its `max_seq_length`
            unless `max_tokens` is given; otherwise they are refused, and the error tells their number of
            tokens.
        add_special_tokens: Whether the tokenizer adds its special tokens to texts and pairs.

    Raises:
        EmptyBatchError: There is no sample.
        TypeError: A sample is neither a text, a pair, token ids nor words.
    """
    is_one = isinstance(samples, (str, tuple)) or _is_ids(samples)
    given: Sequence[Any] = [samples] if is_one else cast("Sequence[Any]", samples)
    if not len(given):
        raise EmptyBatchError("the list of texts is empty; pass at least one")
    return Texts(tuple(text_entry(sample) for sample in given), max_tokens, truncate, add_special_tokens)


@explained
def chat(
    messages: ChatMessages | Sequence[ChatMessages],
    *,
    template: str = "",
    add_generation_prompt: bool = False,
    max_tokens: int | None = None,
    truncate: bool = False,
) -> Texts:
    """Return conversations as an input; the server renders them with the model's own chat template.

        trocar.chat([{"role": "user", "content": "hello"}])

    The content of a message is a text; or texts and images in a list, for a model that takes both:

        trocar.chat([{"role": "user", "content": [Path("cat.jpg"), "what is it?"]}])

    Parts may also be written as for transformers: `{"type": "text", "text": ...}` and `{"type": "image",
    "image": ...}`. If images are sent beside the chat, `{"type": "image"}` stands for the next of them.

    Args:
        messages: Messages, as `{"role": ..., "content": ...}` or (role, content); or a list of conversations.
        template: The name of the chat template, for a tokenizer that has several.
        add_generation_prompt: Whether to add the tokens that begin the assistant's answer.
        max_tokens: As in `texts`.
        truncate: As in `texts`.

    Raises:
        EmptyBatchError: There is no message.
        TypeError: Something is no message, or no part of one.
        ValueError: Some images are within messages, and others are not.
    """
    if not messages:
        raise EmptyBatchError("the conversation is empty; pass at least one message")
    is_one = all(isinstance(message, Mapping) or _is_message_pair(message) for message in messages)
    given: Sequence[Any] = [messages] if is_one else messages
    result = [chat_entry(each) for each in given]
    images = tuple(own for _, own in result)
    if any(images):
        refuse_missing_images(images)
    entries = tuple(entry for entry, _ in result)
    return Texts(
        entries, max_tokens, truncate, True, template, add_generation_prompt, images if any(images) else ()
    )


@explained
def audio(samples: Any, rate: int) -> Audio:
    """Return sound as an input; the server applies the model's own feature extractor.

        client.extract("whisper", trocar.audio(samples, 16_000), ["encoder.layers.3"])

    You can also pass paths of .wav and .flac files as inputs.

    Args:
        samples: An array of one dimension, one channel, floating-point; or a list of these.
        rate: Samples per second; must be the feature extractor's rate.

    Raises:
        EmptyBatchError: There is no clip.
        TypeError: A clip is not an array of floating-point numbers.
        ValueError: A clip does not have one dimension, or `rate` is not positive.
    """
    clips = list(samples) if isinstance(samples, (list, tuple)) else [samples]
    if not clips:
        raise EmptyBatchError("the list of clips is empty; pass at least one")
    if rate < 1:
        raise ValueError(f"rate is {rate}; it is the samples in a second")
    return Audio(tuple(_clip(clip, rate) for clip in clips))


def sound_input(data: bytes | Array, rate: int = 0) -> Audio:
    """Return one clip: a WAV or FLAC file; or, with a rate, samples of one channel.

    Raises:
        TypeError, ValueError: As for `audio`.
    """
    if not isinstance(data, bytes):
        return audio(data, rate)
    return Audio(((pb.AudioClip(encoded_byte_count=len(data)), memoryview(data)),))


def joined_texts(parts: Sequence[Texts]) -> Texts:
    """Return the samples of several batches as one; they have the same options."""
    entries = tuple(entry for part in parts for entry in part.entries)
    return replace(parts[0], entries=entries, images=tuple(own for part in parts for own in part.images))


def processor_input(value: object) -> Texts | Audio | None:
    """Return texts or sound as such; None for other inputs.

    Raises:
        FileNotFoundError: A .wav or .flac file does not exist.
        TypeError: As for `is_texts`.
    """
    if isinstance(value, (Texts, Audio)):
        return value
    if is_texts(value):
        return texts(cast("Any", value))
    files = value if isinstance(value, list) else [value]
    if files and all(map(is_sound_file, files)):
        return _sound_files(files)
    return None


def is_texts(value: object) -> bool:
    """Whether a plain value is texts: strings that name no file, pairs, lists of token ids or of words.

    Raises:
        TypeError: A list holds both texts and names of files.
    """
    if isinstance(value, str):
        return not _names_path(value)
    if _is_pair(value):
        return not any(map(names_file, value))
    if not isinstance(value, list) or not value:
        return False
    if _is_ids(value) or all(_is_ids(item) for item in value):
        return True
    if not all(isinstance(item, str) or _is_pair(item) or _is_ids(item) or _is_words(item) for item in value):
        return False
    named = [item for item in value if isinstance(item, str) and _names_path(item)]
    if named and len(named) < len(value):
        what = "looks like the name of a file" if names_file(named[0]) else "is a folder here"
        raise TypeError(
            f"the list mixes texts with {named[0]!r}, which {what}; write trocar.texts([...]) for texts, and "
            "pathlib.Path for files"
        )
    return not named


def names_file(text: str) -> bool:
    """Whether a string is taken for the name of a file: it looks like one, or there is such a file."""
    if _FILE_NAME.fullmatch(text):
        return True
    return 0 < len(text) <= _MAX_NAME and "\n" not in text and exists(text) and Path(text).is_file()


def _names_path(text: str) -> bool:
    """Whether a string is taken for the name of a file, or there is such a folder."""
    may_be_folder = 0 < len(text) <= _MAX_NAME and "\n" not in text and bool(text.strip("./\\"))
    return names_file(text) or (may_be_folder and exists(text))  # a full stop is a text


def is_sound_file(value: object) -> bool:
    """Whether a value is the path of a .wav or .flac file."""
    return isinstance(value, (str, os.PathLike)) and str(os.fspath(value)).lower().endswith(_SOUND)


def _sound_files(paths: Sequence[Any]) -> Audio:
    """Read .wav and .flac files.

    Raises:
        FileNotFoundError: One does not exist.
    """
    return Audio(tuple(clip for path in paths for clip in sound_input(Path(path).read_bytes()).clips))


def text_entry(sample: object) -> pb.TextEntry:
    """Return one sample as a message: a text, a pair, token ids or words.

    Raises:
        TypeError: It is something else, such as a single number.
    """
    if isinstance(sample, str):
        return pb.TextEntry(text=sample)
    if _is_pair(sample):
        first, second = sample
        return pb.TextEntry(pair=pb.TextPair(first=first, second=second))
    if is_array(sample) and float_array(sample).dtype.kind in "iu":
        sample = float_array(sample).tolist()
    if _is_ids(sample):
        return pb.TextEntry(token_ids=pb.TokenIds(ids=list(map(int, sample))))
    if _is_words(sample):
        return pb.TextEntry(words=pb.WordList(words=sample))
    raise TypeError(
        f"{type(sample).__name__} is no text; pass a string, a tuple of two strings, or a list of token ids "
        "or of words"
    )


def _clip(clip: Any, rate: int) -> tuple[pb.AudioClip, memoryview]:
    if not is_array(clip) or float_array(clip).dtype.kind != "f":
        raise TypeError("a clip is an array of floating-point samples, one channel")
    values: Array = np.ascontiguousarray(float_array(clip), np.dtype("<f4"))
    if values.ndim != 1:
        raise ValueError(f"a clip has shape {values.shape}; it has one dimension, one channel")
    payload = flat_bytes(values).data
    return pb.AudioClip(raw=pb.RawAudio(sample_count=values.size, sample_rate=rate)), payload


def _is_pair(value: object) -> TypeGuard[tuple[str, str]]:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_message_pair(value: object) -> bool:
    is_two = isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == 2
    return is_two and isinstance(cast("tuple[object, ...]", value)[0], str)


def _is_words(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _is_ids(value: object) -> TypeGuard[list[int]]:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(each, (int, np.integer)) for each in cast("list[object]", value))
