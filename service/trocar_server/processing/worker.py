"""Processing worker, a process of its own: `python -m trocar_server.processing.worker PARENT KIND`.

KIND is `text`, `audio` or `image_text`. It answers as `decoding.worker` does; the bytes of an answer are
arrays, one after the other, and a description as JSON.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trocar_server.decoding.worker import serve

_OWN_BYTES = {"text": 2 << 30, "audio": 2 << 30, "image_text": 2 << 30}
"""Memory beside what requests become, see Note: [Memory of workers] in `decoding.worker`.

32 tokenizers of 256,000 tokens take 1.9 GB; the libraries of torch, which processors of sound and images use,
0.95 GB, and without torch a process starts with 0.08 GB (transformers 5.23).
"""
_CLASSES = {"text": "AutoTokenizer", "audio": "AutoFeatureExtractor", "image_text": "AutoProcessor"}
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    """Answer until the input ends."""
    kind = sys.argv[2]
    os.environ.update(_QUIET)
    if kind == "text":
        # Tokenizers need no torch, and without it the process starts in 1 s instead of 3.7, with 90 MB
        # instead of 570 (transformers 5.23).
        sys.modules["torch"] = None  # type: ignore[assignment]  # so that importing it fails
    answers = {"text": _tokens, "audio": _features, "image_text": _image_texts}
    serve(answers[kind], _OWN_BYTES[kind], partial(_import, kind))


def _import(kind: str) -> None:
    """Import what takes seconds, before a request's time begins."""
    with suppress(Exception):  # a request then says what is missing
        import transformers

        getattr(transformers, _CLASSES[kind])


def _tokens(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], Sequence[Any]]:
    from trocar_server.processing.tokenization import detokenize, tokenize

    if head.get("decodes"):
        described = json.dumps(detokenize(head, json.loads(data))).encode()
        return {"parts": [], "described_bytes": len(described)}, [described]
    return _packed(tokenize(head, json.loads(data)))


def _features(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], Sequence[Any]]:
    from trocar_server.processing.audio import extract_features

    clips, start = [], 0
    for size in head["sizes"]:
        clips.append(data[start : start + size])
        start += size
    return _packed(extract_features(head, clips))


def _image_texts(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], Sequence[Any]]:
    from trocar_server.processing.image_texts import process_image_texts

    return _packed(process_image_texts(head, data))


def _packed(made: dict[str, Any]) -> tuple[dict[str, Any], Sequence[Any]]:
    arrays = made.pop("arrays")  # contiguous: see `plain_array`
    described = json.dumps(made).encode()
    parts = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    data = [*(array.reshape(-1).view("uint8") for array in arrays.values()), described]
    return {"parts": parts, "described_bytes": len(described)}, data


if __name__ == "__main__":
    main()
