"""Codec of processor inputs: texts and sound of `Input` messages; and what a processor made of them."""

from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.config import Limits
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import (
    AudioInput,
    AudioSpec,
    ProcessedInput,
    ProcessorInput,
    TextEntry,
    TextInput,
    TextOptions,
)
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_batch, check_count, invalid
from trocar_server.rpc.codec.text import sendable

PROCESSED_KINDS = frozenset({"texts", "audio"})
"""Fields of `Input.value` that a model's processor turns into arguments."""

_TEXT_NAMES = frozenset({"text", "texts", "input_ids"})
"""Names of texts beside other inputs; the first is that of transformers' processors."""
_MAX_SAMPLE_RATE = 1_000_000


def to_processor_input(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> ProcessorInput:
    """Check texts or sound, and append the bytes of its payloads.

    Raises:
        ServiceError: With the field named.
    """
    if entry.convert_to:
        raise invalid(f"{field}.convert_to", "applies to tensors only; leave it out for texts and sound")
    if entry.WhichOneof("value") == "audio":
        return _audio(f"{field}.audio", entry, limits, byte_counts)
    return _texts(f"{field}.texts", entry, limits)


def _texts(field: str, entry: pb.Input, limits: Limits) -> TextInput:
    name = "" if entry.name in _TEXT_NAMES else entry.name
    if name and not name.startswith("decoder"):
        raise invalid(
            field, "become the tokenizer's arguments; name the input 'text', or begin its name with 'decoder'"
        )
    batch = entry.texts
    check_batch(field, len(batch.entries), limits)
    _check_items(field, batch.entries, limits)
    if batch.HasField("max_tokens") and batch.max_tokens < 1:
        raise invalid(f"{field}.max_tokens", f"{batch.max_tokens} is not a number of tokens; give at least 1")
    if len(batch.template) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.template", f"over {MAX_TEXT_CHARACTERS} characters")
    options = TextOptions(
        batch.max_tokens if batch.HasField("max_tokens") else None,
        batch.truncate,
        batch.add_special_tokens if batch.HasField("add_special_tokens") else True,
        batch.template,
        batch.add_generation_prompt,
    )
    entries = tuple(_entry(f"{field}[{i}]", each) for i, each in enumerate(batch.entries))
    return TextInput(name, entries, options)


def _check_items(field: str, entries: Sequence[pb.TextEntry], limits: Limits) -> None:
    """Check the lists within all entries, each item of which counts as a character later, or is an image."""
    most, reason = limits.max_text_characters, ErrorReason.REQUEST_TOO_LARGE
    listed = sum(len(e.token_ids.ids) + len(e.words.words) + len(e.chat.messages) for e in entries)
    check_count(field, listed, most, reason)
    parts = sum(len(message.parts) for entry in entries for message in entry.chat.messages)
    check_count(field, parts, most, reason)


def _entry(field: str, entry: pb.TextEntry) -> TextEntry:
    kind = entry.WhichOneof("form")
    if kind == "text":
        return TextEntry("text", _text(field, entry.text))
    if kind == "pair":
        return TextEntry("pair", (_text(field, entry.pair.first), _text(field, entry.pair.second)))
    if kind == "chat":
        messages = tuple((message.role, _content(field, message)) for message in entry.chat.messages)
        if not messages or any(not role for role, _ in messages):
            raise _rejected(field, "a chat needs at least one message, and each message a role")
        return TextEntry("chat", messages)
    if kind == "words":
        if not entry.words.words:
            raise _rejected(field, "has no word")
        return TextEntry("words", tuple(_text(field, word) for word in entry.words.words))
    if kind == "token_ids":
        ids = tuple(entry.token_ids.ids)
        if not ids:
            raise _rejected(field, "has no token id")
        return TextEntry("ids", ids)
    raise _rejected(field, "has neither a text, a pair, a chat, token ids nor words")


def _content(field: str, message: pb.ChatMessage) -> str | tuple[tuple[str, str], ...]:
    if not message.parts:
        return message.content
    if message.content:
        raise _rejected(field, "a message of a chat has both content and parts; give one of them")
    kinds = [part.WhichOneof("kind") for part in message.parts]
    if None in kinds:
        raise _rejected(field, "a part of a message is neither a text nor an image")
    return tuple((str(kind), part.text) for kind, part in zip(kinds, message.parts, strict=True))


def _text(field: str, text: str) -> str:
    if not text:
        raise _rejected(field, "the text is empty")
    return text


def _audio(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> AudioInput:
    if entry.name not in ("", "audio"):
        raise invalid(field, "becomes the feature extractor's arguments; name the input 'audio'")
    check_batch(field, len(entry.audio.clips), limits)
    clips = tuple(_clip(f"{field}[{i}]", clip, limits) for i, clip in enumerate(entry.audio.clips))
    first_payload = len(byte_counts)
    byte_counts.extend(clip.byte_count for clip in clips)
    return AudioInput("", clips, first_payload)


def _clip(field: str, clip: pb.AudioClip, limits: Limits) -> AudioSpec:
    if clip.WhichOneof("form") == "encoded_byte_count" and clip.encoded_byte_count > 0:
        return AudioSpec(clip.encoded_byte_count)
    count, rate = clip.raw.sample_count, clip.raw.sample_rate
    if count < 1 or not 1 <= rate <= _MAX_SAMPLE_RATE:
        raise _rejected(
            field,
            f"{count:,} samples at {rate:,} samples a second; give at least 1 sample, and its sample rate",
        )
    if count > limits.max_audio_s * rate:
        raise invalid(
            field,
            f"{count / rate:.1f} s, the limit is {limits.max_audio_s:g} s",
            ErrorReason.REQUEST_TOO_LARGE,
        )
    return AudioSpec(count * 4, rate)


def _rejected(field: str, problem: str) -> ServiceError:
    return invalid(field, problem, ErrorReason.INPUT_REJECTED)


def processed_to_wire(processed: ProcessedInput) -> pb.ProcessedInput:
    """Describe what a processor made of one input."""
    return pb.ProcessedInput(
        name=processed.name,
        samples=[
            pb.ProcessedSample(
                length=sample.length,
                token_ids=sample.token_ids,
                tokens=map(sendable, sample.tokens),
                starts=sample.starts,
                ends=sample.ends,
                is_special=sample.is_special,
                rendered=sendable(sample.rendered),
            )
            for sample in processed.samples
        ],
        padded_length=processed.padded_length,
        pads_left=processed.pads_left,
        arguments=processed.arguments,
        processor_digest=processed.digest,
    )
