"""Validation of an upload's manifest."""

import re

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.dataset_schema import Manifest, Shard

MAX_SHARD_BYTES = 256 << 20
MAX_SHARDS = 16_384
MAX_CATEGORIES = 100_000
MAX_NAME_CHARACTERS = 200

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(manifest: Manifest) -> None:
    """Refuse an invalid manifest.

    Raises:
        ServiceError: `DATASET_INVALID`, with every problem.
    """
    problems = []
    if not _is_name(manifest.name):
        shown = manifest.name[:80]
        problems.append(f"name: {shown!r}; 1 to {MAX_NAME_CHARACTERS} printable characters are needed")
    if len(manifest.categories) > MAX_CATEGORIES or not all(map(_is_name, manifest.categories)):
        problems.append(
            f"categories: at most {MAX_CATEGORIES:,}, each of 1 to {MAX_NAME_CHARACTERS} printable characters"
        )
    if not 1 <= len(manifest.shards) <= MAX_SHARDS:
        problems.append(f"shards: there are {len(manifest.shards):,}, 1 to {MAX_SHARDS:,} are allowed")
    problems += [
        f"shards[{index}]: {problem}"
        for index, shard in enumerate(manifest.shards[:MAX_SHARDS])
        if (problem := _problem(shard))
    ]
    count = sum(shard.sample_count for shard in manifest.shards)
    if count != manifest.sample_count:
        problems.append(f"sample_count: {manifest.sample_count:,}, but the shards have {count:,}")
    if len({(shard.sha256, shard.byte_count) for shard in manifest.shards}) != len(manifest.sizes()):
        problems.append("shards: the same sha256 with two sizes")
    if problems:
        raise ServiceError(
            ErrorReason.DATASET_INVALID, f"the description of the data set is wrong: {'; '.join(problems)}"
        )


def _problem(shard: Shard) -> str:
    if not _SHA256.fullmatch(shard.sha256):
        return "sha256 is 64 hexadecimal digits in lower case"
    if not 1 <= shard.byte_count <= MAX_SHARD_BYTES:
        return f"byte_count is 1 to {MAX_SHARD_BYTES:,}"
    if not 1 <= shard.sample_count <= shard.byte_count:
        return "sample_count is at least 1, and not more than bytes"
    return ""


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
