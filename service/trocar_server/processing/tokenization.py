"""Tokenization by a model's own tokenizer, in a worker process."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.processing.text_lengths import check_rendered, check_text_bytes, check_tokens

MOST_CACHED = 32
"""Tokenizers and other processors in memory; those of models that were loaded again go with time.

One of 256,000 tokens takes 60 MB (tokenizers 0.23): all fit into the address space of the worker for texts.
"""
_UNLIMITED = 10**9
"""Tokenizers without a maximum have 10 ** 30 or so as theirs."""

Content: TypeAlias = str | Sequence[Sequence[str]]
"""Of a message: a text; or parts, each `text` or `image` and the text."""
Message: TypeAlias = Sequence[Any]
"""Role and content."""

_MARK = "\ue000"
"""Begins what stands for a content in a template: a character for private use."""


def tokenize(head: dict[str, Any], entries: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the arguments and the description of a batch of texts.

    Args:
        head: The options, limits, and names of the arguments that the model takes; see `exchange`.
        entries: Kind and content of each sample.

    Raises:
        ServiceError: `INPUT_REJECTED`, a sample is too long or cannot be tokenized; `REQUEST_TOO_LARGE`, the
            batch has too many tokens; `MODEL_INVALID`, the tokenizer cannot be loaded.
    """
    tokenizer = _tokenizer(head["folder"], head["version"])
    limit = token_limit(tokenizer, head)
    encoded, rendered_count = [], 0
    for index, (kind, content) in enumerate(entries):
        encoded.append(_encoded(tokenizer, index, kind, content, head, limit))
        rendered_count += len(encoded[-1]["rendered"])
        check_rendered(rendered_count, head["most_bytes"])
    lengths = [len(each["input_ids"]) for each in encoded]
    padded_length = max(*lengths, head["padded_tokens"])
    check_tokens(lengths, head["padded_tokens"], head["most_tokens"])
    names = [name for name in _names(tokenizer, encoded) if head["names"] is None or name in head["names"]]
    is_masked = (
        "attention_mask" in names
    )  # without a mask padding is read as the model was trained to read it
    may_pad_left = tokenizer.pad_token_id is not None and not (is_masked and head["left_padding"] == "right")
    pads_left = may_pad_left and tokenizer.padding_side == "left"
    has_positions = (
        pads_left and is_masked and head["left_padding"] == "positions" and min(lengths) < padded_length
    )
    check_text_bytes(lengths, padded_length, len(names) + has_positions, head["most_bytes"])
    arrays = {name: _padded(tokenizer, name, encoded, padded_length, pads_left=pads_left) for name in names}
    if has_positions:
        arrays["position_ids"] = _positions(lengths, padded_length)
    samples = [_described(tokenizer, each) for each in encoded]
    return {"arrays": arrays, "samples": samples, "padded_length": padded_length, "pads_left": pads_left}


def detokenize(head: dict[str, Any], lists: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each list of token ids, special tokens included.

    Raises:
        ServiceError: `MODEL_INVALID`, the tokenizer cannot be loaded, or decode.
    """
    tokenizer = _tokenizer(head["folder"], head["version"])
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    try:
        return [str(tokenizer.decode(ids, **options)) if ids else "" for ids in lists]
    except Exception as error:
        raise _no_tokenizer(first_line(error)) from error


@lru_cache(maxsize=MOST_CACHED)
def _tokenizer(folder: str, version: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            "this server has no tokenizers; its operator has to install trocar[transformers]",
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _no_tokenizer(first_line(error)) from error
    if _sentence_settings(folder, version).get("do_lower_case"):
        _lower_case(tokenizer)
    return tokenizer


def _lower_case(tokenizer: Any) -> None:
    """Have a tokenizer lower every text first, as sentence-transformers does where its folder says so."""
    if not tokenizer.is_fast:
        raise _no_tokenizer("do_lower_case of a sentence-transformers folder needs a fast tokenizer")
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = Sequence([Lowercase(), *own])


def _no_tokenizer(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, f"the model's tokenizer cannot be loaded: {problem}")


def token_limit(tokenizer: Any, head: dict[str, Any]) -> int:
    """Return the most tokens of one sample.

    Raises:
        ServiceError: `INPUT_REJECTED`, more were asked for than the model takes.
    """
    result = [count for count in (tokenizer.model_max_length, head["model_tokens"]) if count]
    most = int(min([*result, _UNLIMITED]))
    wanted = head["max_tokens"]
    if wanted is not None and wanted > most:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED, f"max_tokens is {wanted:,}, and the model takes {most:,} tokens"
        )
    if wanted is None and head["truncate"]:
        return min(most, _sentence_tokens(head["folder"], head["version"]) or most)
    return most if wanted is None else wanted


def _sentence_tokens(folder: str, version: str) -> int | None:
    """Return the `max_seq_length` of a sentence-transformers folder: there that library cuts every text."""
    count = _sentence_settings(folder, version).get("max_seq_length")
    return count if isinstance(count, int) and count > 0 else None


@lru_cache(maxsize=MOST_CACHED)
def _sentence_settings(folder: str, _version: str) -> dict[str, Any]:
    """Return what a sentence-transformers folder says of its transformer; nothing for other folders.

    The file was checked with those of the tokenizer, see `processor_digest`.
    """
    for file in sorted(Path(folder).glob("sentence_*_config.json")):  # sentence_bert_config.json, and others
        settings = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(settings, dict):
            return settings
    return {}


def _encoded(
    tokenizer: Any, index: int, kind: str, content: Any, head: dict[str, Any], limit: int
) -> dict[str, Any]:
    """Return the tokens of one sample, unpadded, with at most `limit` of them."""
    if kind == "ids":
        result = _of_ids(tokenizer, index, content)
    else:
        rendered = render(tokenizer, index, content, head) if kind == "chat" else ""
        texts = content if kind == "pair" else [rendered] if kind == "chat" else [content]
        specials = head["add_special_tokens"] and kind != "chat"  # a template writes its own
        cut = {"truncation": True, "max_length": limit} if head["truncate"] else {}
        try:
            encoding = tokenizer(
                *texts,
                add_special_tokens=specials,
                return_offsets_mapping=tokenizer.is_fast,
                return_special_tokens_mask=True,
                is_split_into_words=kind == "words",
                verbose=False,
                **cut,
            )
        except Exception as error:
            raise _rejected(index, f"cannot be tokenized: {first_line(error)}") from error
        result = {**encoding, "rendered": rendered}
        if tokenizer.is_fast:
            result["words"] = [-1 if word is None else word for word in encoding.word_ids(0)]
        if kind == "pair" and tokenizer.is_fast:
            result["texts"] = [-1 if text is None else text for text in encoding.sequence_ids(0)]
        if kind == "words" and tokenizer.is_fast:
            result["offset_mapping"] = _joined(result["offset_mapping"], result["words"], content)
        if kind == "chat":
            result["contents"] = chat_contents(tokenizer, content, rendered, head)
    count = len(result["input_ids"])
    if count == 0:
        raise _rejected(index, "has no token")
    if count > limit and kind == "ids" and head["truncate"]:
        return {name: value[:limit] for name, value in result.items()}
    if count > limit:
        advice = "shorten it, or have it cut: in Python `trocar.texts(..., truncate=True)`"
        raise too_many_tokens(index, count, limit, advice)
    return result


def _joined(offsets: Sequence[Sequence[int]], places: Sequence[int], words: Sequence[str]) -> list[Any]:
    """Return offsets in the text of words with spaces between them, of offsets in each word."""
    starts = [*accumulate((len(word) + 1 for word in words), initial=0)]
    return [
        (starts[place] + start, starts[place] + end) if place >= 0 else (start, end)
        for (start, end), place in zip(offsets, places, strict=True)
    ]


def _of_ids(tokenizer: Any, index: int, ids: Sequence[int]) -> dict[str, Any]:
    unknown = [each for each in ids if not 0 <= each < len(tokenizer)]
    if unknown:
        raise _rejected(
            index, f"has the token id {unknown[0]}, the vocabulary ends with {len(tokenizer) - 1}"
        )
    special = set(tokenizer.all_special_ids)
    result: dict[str, Any] = {"input_ids": list(ids), "attention_mask": [1] * len(ids)}
    if "token_type_ids" in tokenizer.model_input_names:
        result["token_type_ids"] = [0] * len(ids)
    return {**result, "special_tokens_mask": [int(each in special) for each in ids], "rendered": ""}


def render(tokenizer: Any, index: int, messages: Sequence[Message], head: dict[str, Any]) -> str:
    """Render a chat by the tokenizer's template, in transformers' sandbox.

    Raises:
        ServiceError: `INPUT_REJECTED`, there is no such template, or it fails.
    """
    if not tokenizer.chat_template:
        raise _rejected(index, "is a chat, and the model's tokenizer has no chat template; send a text")
    if head["template"] and head["template"] not in _templates(tokenizer):
        known = ", ".join(_templates(tokenizer)) or "one without a name"
        raise _rejected(index, f"names the chat template '{head['template'][:80]}'; there is {known}")
    try:
        rendered = _by_template(tokenizer, messages, head)
    except Exception as error:
        raise _rejected(index, f"cannot be rendered by the chat template: {first_line(error)}") from error
    if not rendered or len(rendered) > head["most_characters"]:
        raise _rejected(index, f"is a chat that becomes {len(rendered):,} characters")
    return str(rendered)


def _by_template(tokenizer: Any, messages: Sequence[Message], head: dict[str, Any]) -> str:
    return str(
        tokenizer.apply_chat_template(
            [{"role": role, "content": _content(content)} for role, content in messages],
            tokenize=False,
            chat_template=head["template"] or None,
            add_generation_prompt=head["add_generation_prompt"],
        )
    )


def _content(content: Content) -> Any:
    """Return a message's content as templates take it: a text, or parts."""
    if isinstance(content, str):
        return content
    return [{"type": kind} if kind == "image" else {"type": kind, kind: text} for kind, text in content]


def chat_contents(
    tokenizer: Any, messages: Sequence[Message], rendered: str, head: dict[str, Any]
) -> list[tuple[str, int, int]] | None:
    """Return role, start and stop of each text of a message in a rendered chat; None where it is not certain.

    The template renders the chat once more, with a mark in place of each text: what stands between the
    marks is the template's own, so a text that occurs elsewhere, as "user" does, is not mistaken. A
    template that trims texts is recognised; one that changes what it writes by them is not.
    """
    given = [(role, text) for role, content in messages for text in _texts(content)]
    marks = [f"{_MARK}{place};" for place in range(len(given))]
    try:
        marked = _by_template(tokenizer, _with_marks(messages, iter(marks)), head)
    except Exception:  # noqa: BLE001 - a template may refuse any content, with any error
        return None
    result: list[tuple[str, int, int]] = []
    end = 0
    for (role, content), mark in zip(given, marks, strict=True):
        literal, is_marked, marked = marked.partition(mark)
        start = end + len(literal)
        after = marked.partition(_MARK)[0]
        forms = (content, content.strip(), content.rstrip(), content.lstrip())
        written = next((form for form in forms if rendered.startswith(form + after, start)), None)
        if not is_marked or not rendered.startswith(literal, end) or written is None:
            return None
        end = start + len(written)
        result.append((role, start, end))
    return result if rendered[end:] == marked else None


def _texts(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [text for kind, text in content if kind == "text"]


def _with_marks(messages: Sequence[Message], marks: Iterator[str]) -> list[Message]:
    return [
        (role, next(marks))
        if isinstance(content, str)
        else (role, [(kind, next(marks) if kind == "text" else text) for kind, text in content])
        for role, content in messages
    ]


def _templates(tokenizer: Any) -> list[str]:
    return sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []


def _names(tokenizer: Any, encoded: Sequence[dict[str, Any]]) -> list[str]:
    """Return the arguments that every sample has, in the tokenizer's order."""
    names = ["input_ids", *(name for name in tokenizer.model_input_names if name != "input_ids")]
    return [name for name in names if all(name in each for each in encoded)]


def _padded(
    tokenizer: Any, name: str, encoded: Sequence[dict[str, Any]], padded_length: int, *, pads_left: bool
) -> Any:
    fill = _fill(tokenizer, name)
    values = np.full((len(encoded), padded_length), fill, np.int64)
    for row, each in zip(values, encoded, strict=True):
        own = each[name]
        row[padded_length - len(own) if pads_left else 0 :][: len(own)] = own
    return values


def _positions(lengths: Sequence[int], padded_length: int) -> Any:
    """Return each token's place in its own text that is padded on the left; 0 for padding."""
    first = padded_length - np.asarray(lengths, np.int64)[:, None]
    return np.maximum(np.arange(padded_length, dtype=np.int64) - first, 0)


def _fill(tokenizer: Any, name: str) -> int:
    """Return what an argument is padded with; a tokenizer without a padding token is padded with its last.

    The attention mask is 0 there, and with padding on the right no causal model looks at it.
    """
    if name == "input_ids":
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return next(int(each) for each in ids if each is not None)
    return int(tokenizer.pad_token_type_id) if name == "token_type_ids" else 0


def _described(tokenizer: Any, encoded: dict[str, Any]) -> dict[str, Any]:
    ids = encoded["input_ids"]
    offsets = encoded.get("offset_mapping", [])
    return {
        "token_ids": ids,
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "starts": [start for start, _ in offsets],
        "ends": [end for _, end in offsets],
        "is_special": [bool(each) for each in encoded["special_tokens_mask"]],
        "rendered": encoded["rendered"],
        "texts": encoded.get("texts", []),
        "words": encoded.get("words", []),
        "contents": encoded.get("contents"),
    }


def too_many_tokens(index: int, count: int, limit: int, advice: str) -> ServiceError:
    """Error for a text of too many tokens."""
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        f"text {index} has {count:,} tokens, the model takes {limit:,}; {advice}",
        token_count=str(count),
        limit=str(limit),
        sample=str(index),
    )


def _rejected(index: int, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INPUT_REJECTED, f"text {index} {problem}", sample=str(index))
