"""Texts with images by a model's own processor, in a worker process: Qwen2-VL, Idefics 3, Pix2Struct.

The processor prepares the images, and expands the placeholder of each in its text to as many tokens as the
image becomes.

# Note: [Images before their tokens]
The number of an image's tokens follows from its size, by a rule of the processor's own that needs no pixel.
So tokens and bytes are checked before any image is decoded, and a dry run processes blank images of these
sizes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.processing.audio import plain_array
from trocar_server.processing.text_lengths import check_tokens
from trocar_server.processing.tokenization import (
    MOST_CACHED,
    chat_contents,
    render,
    token_limit,
    too_many_tokens,
)

_VALUE_BYTES = 4
_MASK_BYTES = 8
_BLANK = (200, 200, 200)
"""Not a value that some normalisation makes zero: Idefics takes images of zeros for padding."""
_SPARE = 8
"""Of so many counted tokens of an image one may not be there: tokenizers join line ends."""
_MOST_PATCHES = 2048
"""Of Pix2Struct's processor, whatever its image processor says (transformers 5.23)."""


def process_image_texts(head: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return the arguments and the description of texts with images.

    Args:
        head: The options, the limits, kind and content of each text, the sizes of the images, and what is
            wanted; see `exchange`.
        data: The RGB values of each image; empty for blank ones.

    Returns:
        The description; where only `measures` is wanted, only the bytes of the images' arguments.

    Raises:
        ServiceError: `INPUT_REJECTED`, texts and images do not fit, or cannot be processed;
            `REQUEST_TOO_LARGE`, there are too many tokens; `IMAGE_TOO_LARGE`, the images become too large;
            `NO_PREPROCESSING` or `MODEL_INVALID`, the processor cannot be used.
    """
    processor = _processor(head["folder"], head["version"])
    entries = head["entries"]
    sizes = [tuple(size) for size in head["sizes"]]
    if entries and head["truncate"] and sizes:
        raise _rejected("texts with images cannot be cut: the tokens of an image belong together")
    texts = [
        render(processor.tokenizer, index, content, head) if kind == "chat" else str(content)
        for index, (kind, content) in enumerate(entries)
    ]
    counts = _placed(processor, texts, len(sizes))
    image_bytes = _check_size(processor, texts, counts, sizes, head)
    if head["measures"]:
        return {"arrays": {}, "samples": [], "image_bytes": image_bytes}
    images = list(_images(sizes, data))
    made, heard = _made(processor, entries, texts, images, head)
    _check_padding(heard.masks, head)
    taken = head["names"]
    arrays = {name: plain_array(made[name]) for name in made if taken is None or name in taken}
    if not texts:
        return {"arrays": arrays, "samples": []}
    samples = [
        _described(processor, heard, index, entry, text, head)
        for index, (entry, text) in enumerate(zip(entries, texts, strict=True))
    ]
    return {
        "arrays": arrays,
        "samples": samples,
        "padded_length": len(heard.ids[0]),
        "pads_left": processor.tokenizer.padding_side == "left",
    }


@lru_cache(maxsize=MOST_CACHED)
def _processor(folder: str, _version: str) -> Any:
    try:
        from transformers import AutoImageProcessor, AutoProcessor

        load: Any = AutoProcessor.from_pretrained  # untyped (transformers 5.23)
        load_images: Any = AutoImageProcessor.from_pretrained
        options = {"local_files_only": True, "trust_remote_code": False}
        result = load(folder, **options)
        # Pillow's, as for every other model; AutoProcessor cannot choose it: processors of videos have none.
        result.image_processor = load_images(folder, backend="pil", **options)
    except ImportError as error:
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            f"this server cannot run the model's processor: {first_line(error)}; its operator has to install "
            "trocar[transformers]",
        ) from None
    except Exception as error:
        problem = first_line(error)
        raise ServiceError(
            ErrorReason.MODEL_INVALID, f"the model's processor cannot be loaded: {problem}"
        ) from error
    if getattr(result.image_processor, "is_vqa", False):
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            "the model's processor draws the text into the image (is_vqa), with a font that it would "
            "download; prepare the images and send flattened_patches",
        )
    tokenizer = result.tokenizer
    tokenizer.chat_template = getattr(result, "chat_template", None) or tokenizer.chat_template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return result


def _placed(processor: Any, texts: Sequence[str], image_count: int) -> list[int]:
    """Return the number of images in each text: by its placeholders, or one without them.

    Raises:
        ServiceError: `INPUT_REJECTED`, they do not fit.
    """
    token = getattr(processor, "image_token", None)
    if token is None:
        if image_count and texts and len(texts) != image_count:
            raise _rejected(f"{len(texts)} texts and {image_count} images; send one image with each text")
        if not image_count:
            raise _rejected('the model takes images: in Python `{"text": texts, "images": images}`')
        return [1] * image_count
    counts = [text.count(token) for text in texts]
    if sum(counts) == image_count:
        return counts
    if not texts:
        raise _rejected(
            f"images need a text that holds the placeholder '{token}' for each: in Python "
            '`{"text": texts, "images": images}`, or a chat with images'
        )
    places = ", ".join(f"text {index}: {count}" for index, count in enumerate(counts[:8]))
    raise _rejected(
        f"the texts have {sum(counts)} placeholders '{token}' ({places}), and {image_count} images were "
        "sent; each image needs one, in the same order"
    )


def _check_size(
    processor: Any,
    texts: Sequence[str],
    counts: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    head: dict[str, Any],
) -> int:
    """Return the bytes of the images' arguments, after a check of these and of the tokens.

    Raises:
        ServiceError: `IMAGE_TOO_LARGE`, `REQUEST_TOO_LARGE` or `INPUT_REJECTED`.
    """
    tokens, patches = _tokens_and_patches(processor, sizes)
    byte_count = _image_bytes(processor.image_processor, counts, patches)
    if byte_count > head["most_bytes"]:
        raise ServiceError(
            ErrorReason.IMAGE_TOO_LARGE,
            f"the images become {byte_count:,} bytes, one call may have {head['most_bytes']:,}; send "
            "fewer or smaller ones",
        )
    _check_tokens(processor, texts, counts, tokens, head)
    return byte_count


def _check_tokens(
    processor: Any,
    texts: Sequence[str],
    counts: Sequence[int],
    image_tokens: Sequence[int],
    head: dict[str, Any],
) -> None:
    """Refuse too many tokens of a text, or of all with their padding.

    Raises:
        ServiceError: `INPUT_REJECTED` or `REQUEST_TOO_LARGE`.
    """
    tokenizer, limit = processor.tokenizer, token_limit(processor.tokenizer, head)
    options = {**_text_options(tokenizer, head["entries"], head), "padding": False} if texts else {}
    longest, starts = 0, 0
    for index, (text, count) in enumerate(zip(texts, counts, strict=False)):
        length = len(tokenizer(text, **options)["input_ids"])
        if count and image_tokens:
            own = image_tokens[starts : starts + count]
            length += sum(each - each // _SPARE for each in own) - count
        starts += count
        if length > limit:
            raise too_many_tokens(index, length, limit, "send smaller images or a shorter text")
        longest = max(longest, length)
    check_tokens([longest] * len(texts), 0, head["most_tokens"])


def _tokens_and_patches(
    processor: Any, sizes: Sequence[tuple[int, int]]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the number of tokens, about, and of patches of each image; no tokens without a placeholder."""
    if not sizes or getattr(processor, "image_token", None) is None:
        image_processor = processor.image_processor
        most = max(_MOST_PATCHES, int(getattr(image_processor, "max_patches", 0) or 0))
        return (), [most] * len(sizes)
    try:
        counted = processor._get_num_multimodal_tokens(image_sizes=sizes)
    except Exception as error:
        raise _rejected(f"the model's processor cannot take the images: {first_line(error)}") from error
    return counted["num_image_tokens"], [max(1, count) for count in counted["num_image_patches"]]


def _image_bytes(image_processor: Any, counts: Sequence[int], patches: Sequence[int]) -> int:
    """Return the bytes that images become; where the images of a text are padded, with these."""
    longest = getattr(image_processor, "max_image_size", None)
    if longest:
        side, start, most = int(dict(longest)["longest_edge"]), 0, 0
        for count in counts:
            most, start = max(most, sum(patches[start : start + count])), start + count
        return len(counts) * most * side * side * (3 * _VALUE_BYTES + _MASK_BYTES)
    patch = image_processor.patch_size
    sides = (patch, patch) if isinstance(patch, int) else (dict(patch)["height"], dict(patch)["width"])
    frames = int(getattr(image_processor, "temporal_patch_size", 1))
    values = 3 * frames * int(sides[0]) * int(sides[1]) + 3  # two more for a place, and one for the mask
    return sum(patches) * values * _VALUE_BYTES


def _images(sizes: Sequence[tuple[int, int]], pixels: bytes) -> Iterator[Image.Image]:
    """Yield the images; blank ones where no pixels were sent."""
    start = 0
    for height, width in sizes:
        if not pixels:
            yield Image.new("RGB", (width, height), _BLANK)
            continue
        yield Image.frombytes("RGB", (width, height), pixels[start : start + height * width * 3])
        start += height * width * 3


class _Heard:
    """A tokenizer that keeps the texts it was called with, and what it returned.

    A processor tells neither: its texts have the placeholders expanded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.ids: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.encodings: Any = None

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        encoding = self._tokenizer(text, *args, **options)
        self.encodings = encoding.encodings
        # Copies: Pix2Struct's processor takes them out.
        self.ids = [[int(each) for each in row] for row in encoding["input_ids"]]
        self.masks = (
            [each.attention_mask for each in self.encodings]
            if self.encodings
            else [[int(each) for each in row] for row in encoding["attention_mask"]]
        )
        return encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _made(
    processor: Any,
    entries: Sequence[Any],
    texts: Sequence[str],
    images: Sequence[Image.Image],
    head: dict[str, Any],
) -> tuple[dict[str, Any], _Heard]:
    """Run the processor.

    Raises:
        ServiceError: `INPUT_REJECTED`, it refuses them.
    """
    tokenizer = processor.tokenizer
    heard = _Heard(tokenizer)
    processor.tokenizer = heard
    try:
        made = processor(
            text=list(texts) or None,
            images=list(images) or None,
            return_tensors="np",
            **(_text_options(tokenizer, entries, head) if texts else {}),
        )
    except Exception as error:
        raise _rejected(f"the model's processor cannot take them: {first_line(error)}") from error
    finally:
        processor.tokenizer = tokenizer
    return {name: np.asarray(value) for name, value in made.items()}, heard


def _check_padding(masks: Sequence[Sequence[int]], head: dict[str, Any]) -> None:
    """Refuse padding on the left for a model that would count it. See Note: [Padding on the left].

    Raises:
        ServiceError: `INPUT_REJECTED`, the processor pads on the left, and the model takes no position ids.
    """
    if head["left_padding"] == "right" and any(any(mask) and not mask[0] for mask in masks):
        raise _rejected(
            "the model's processor pads texts of different lengths on the left, and the model takes no "
            "position ids, so the padding would move every token: send texts of equal length, one text a "
            "call, or arrays"
        )


def _text_options(tokenizer: Any, entries: Sequence[Any], head: dict[str, Any]) -> dict[str, Any]:
    are_chats = {kind == "chat" for kind, _ in entries}
    if len(are_chats) > 1:
        raise _rejected("chats and other texts need separate calls: templates write their own special tokens")
    options: dict[str, Any] = {"padding": True, "verbose": False}
    if are_chats == {True} or not head["add_special_tokens"]:
        options["add_special_tokens"] = False
    if head["truncate"]:
        options |= {"truncation": True, "max_length": token_limit(tokenizer, head)}
    return options


def _described(
    processor: Any, heard: _Heard, index: int, entry: Sequence[Any], text: str, head: dict[str, Any]
) -> dict[str, Any]:
    """Describe the tokens of one text, without its padding."""
    kind, content = entry
    tokenizer, expanded = processor.tokenizer, heard.texts[index]
    kept = [place for place, is_token in enumerate(heard.masks[index]) if is_token]
    ids = [heard.ids[index][place] for place in kept]
    limit = token_limit(tokenizer, head)
    if len(ids) > limit:
        raise too_many_tokens(index, len(ids), limit, "send smaller images or a shorter text")
    result: dict[str, Any] = {
        "token_ids": ids,
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "starts": [],
        "ends": [],
        "is_special": [each in tokenizer.all_special_ids for each in ids],
        "rendered": expanded if kind == "chat" or expanded != content else "",
        "contents": None,
    }
    if heard.encodings:
        own = heard.encodings[index]
        result["starts"] = [own.offsets[place][0] for place in kept]
        result["ends"] = [own.offsets[place][1] for place in kept]
        result["is_special"] = [bool(own.special_tokens_mask[place]) for place in kept]
        result["words"] = [-1 if own.word_ids[place] is None else own.word_ids[place] for place in kept]
    if kind == "chat":
        contents = chat_contents(tokenizer, content, text, head)
        token = getattr(processor, "image_token", None)
        result["contents"] = _moved(contents, text.split(token) if token else [text], token, expanded)
    return result


def _moved(
    contents: Sequence[tuple[str, int, int]] | None, pieces: Sequence[str], token: str | None, expanded: str
) -> list[tuple[str, int, int]] | None:
    """Return contents of a rendered chat where they are once its placeholders are expanded; None if unknown.

    Args:
        contents: Role, start and stop of each.
        pieces: The chat, split at the placeholders.
        token: A placeholder.
        expanded: The chat with its placeholders expanded.
    """
    if contents is None:
        return None
    shifts: list[tuple[int, int]] = [(0, 0)]  # from where on in the chat, by how much
    before, after = len(pieces[0]), len(pieces[0])
    for number, piece in enumerate(pieces[1:], 2):
        assert token is not None
        is_last = number == len(pieces)
        result = len(expanded) - len(piece) if is_last else expanded.find(piece, after + 1)
        if result < after or not expanded.startswith(piece, result):
            return None
        before += len(token)
        shifts.append((before, result - before))
        before, after = before + len(piece), result + len(piece)
    moved = []
    for role, start, stop in contents:
        by = next(shift for begin, shift in reversed(shifts) if start >= begin)
        moved.append((role, start + by, stop + by))
    return moved


def _rejected(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INPUT_REJECTED, problem)
