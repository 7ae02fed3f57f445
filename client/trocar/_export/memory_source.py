"""Texts and sound in memory as the source of an export; the keys are the indices."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from trocar._base.input_kinds import exists
from trocar._request.texts import Audio, Texts, is_texts, texts
from trocar._sources.content import content_digest
from trocar._sources.sample import Sample, Source


def memory_source(given: object) -> Source | None:
    """Return the source of texts and sound in memory; None for what is neither.

    A list of paths of sound files is none: these stay on disk.

    Raises:
        TypeError: A list holds both texts and names of files.
    """
    if isinstance(given, list) and not _has_sources(given) and is_texts(given):
        given = texts(given)
    if isinstance(given, Texts):
        digest = _digest([entry.SerializeToString(deterministic=True) for entry in given.entries])
        options = {
            "max_tokens": given.max_tokens,
            "truncate": given.truncate,
            "add_special_tokens": given.add_special_tokens,
            "template": given.template,
            "add_generation_prompt": given.add_generation_prompt,
        }
        more = {"options": options, **({"images": content_digest(given.own_images)} if given.images else {})}
        return _source("texts", given.part, len(given), digest, more)
    if isinstance(given, Audio):
        digest = _digest([part for clip, data in given.clips for part in (clip.SerializeToString(), data)])
        return _source("sound", given.part, len(given), digest, {})
    return None


def _has_sources(given: list[Any]) -> bool:
    """Whether a list names sources: folders, and names of datasets, which look like no file."""
    return any(isinstance(one, str) and (one.startswith(("torch:", "hf:")) or exists(one)) for one in given)


def _source(
    kind: str, part: Callable[[int, int], object], count: int, digest: str, more: dict[str, Any]
) -> Source:
    def samples(start: int) -> Iterator[Sample]:
        for index in range(start, count):
            yield Sample(str(index), partial(part, index, index + 1), (index + 1) / count)

    return Source({"kind": kind, "count": count, "fingerprint": digest, **more}, samples, count)


def _digest(parts: list[Any]) -> str:
    result = hashlib.sha256()
    for part in parts:
        result.update(len(part).to_bytes(8, "little"))
        result.update(part)
    return result.hexdigest()
