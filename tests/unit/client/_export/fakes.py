"""A client without a server: what it computes depends on every byte and on the size of the batch."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trocar import FeatureMapInfo, FeatureMaps, Model, ServerInfo, ServerLimits, ServerTiming
from trocar._base.call_options import AS_CONNECTED, CallOptions
from trocar._base.tensors import Array
from trocar._request.stored.stored_edits import StoredEdits
from trocar._result.processed import ProcessedInput, ProcessedSample
from trocar.errors import InputError, InvalidImageError, TrocarError

BAD = b"bad"
"""How the content of a sample begins that the server cannot decode."""
WIDE = b"wide"
"""How the content of a sample begins whose feature map is wider than the others."""
COLUMNS = ("wide/in", "code")


@dataclass(frozen=True)
class StreamResult:
    index: int
    maps: FeatureMaps | None
    error: TrocarError | None
    checkpoint: bytes | None = None


class FakeClient:
    """Answers like a client of a server that hosts one model."""

    def __init__(
        self, *, fail_at: int | None = None, error: TrocarError | None = None, digest: str = ""
    ) -> None:
        self.calls: list[int] = []
        self.edits: list[Any] = []
        self.stored: list[StoredEdits] = []
        self._fail_at = fail_at
        self._error = error
        self._digest = digest

    def model(self, model_id: str, *, has_digest: bool = False) -> Model:
        found = Model(
            model_id, "loaded", "custom", "m:M", "random:0", 7, 28, "cpu", "float32", None, (), (2, 3)
        )
        return replace(found, digest=self._digest) if has_digest else found

    def server_info(self) -> ServerInfo:
        return ServerInfo(
            "1",
            "2.14",
            "cpu",
            ServerLimits(
                *(1 << 30, 1 << 30, 1 << 20, 64, 8, 10_000, 8, 1 << 30, 256, 1 << 30, 16, 604_800.0, 8),
                *(1 << 33, 1 << 32, 1800.0, 600.0, 600.0),
            ),
        )

    def stored_edits(self, model_id: str) -> list[StoredEdits]:
        return self.stored

    def extract(
        self,
        model_id: str,
        inputs: Any,
        taps: Sequence[Any],
        *,
        edits: Sequence[Any] = (),
        options: CallOptions = AS_CONNECTED,
        adapter: str = "",
    ) -> FeatureMaps:
        if self._error is not None and len(self.calls) == self._fail_at:
            raise self._error
        self.calls.append(len(inputs))
        self.edits.append(edits)
        return computed(inputs, taps)

    @contextmanager
    def extract_stream(
        self,
        model_id: str,
        batches: Iterable[Any],
        taps: Sequence[Any],
        *,
        edits: Sequence[Any] = (),
        options: CallOptions = AS_CONNECTED,
        adapter: str = "",
        running_statistics: bool = False,
    ) -> Iterator[Iterator[StreamResult]]:
        def results() -> Iterator[StreamResult]:
            for index, batch in enumerate(batches):
                try:
                    result = StreamResult(index, self.extract(model_id, batch, taps, edits=edits), None)
                except InputError as error:
                    result = StreamResult(index, None, error)
                yield result

        yield results()


StreamingClient = FakeClient


class FakeTextClient(FakeClient):
    """Answers like a client of a server that hosts a model of texts, whose tokens are words."""

    def plan(self, model_id: str, inputs: Any, taps: Sequence[Any]) -> Any:
        ids = [list(entry.token_ids.ids) for entry in inputs.entries]
        return computed_of_words(ids)

    def extract(
        self,
        model_id: str,
        inputs: Any,
        taps: Sequence[Any],
        *,
        edits: Sequence[Any] = (),
        options: CallOptions = AS_CONNECTED,
        adapter: str = "",
    ) -> Any:
        words = [entry.text.split() for entry in inputs.entries]
        if any("bad" in own for own in words):
            raise InputError("a text is bad")
        return computed_of_words(words)


def computed_of_words(words: list[list[Any]]) -> Any:
    """Compute (batch, words, 3), (batch, 2, words, words) and (batch, 1), which depend on the batch size."""
    longest = max(map(len, words))
    tokens = np.full((len(words), longest, 3), np.nan, np.float32)
    for index, own in enumerate(words):
        for place, word in enumerate(own):
            tokens[index, place] = np.frombuffer(
                hashlib.sha256(f"{word} {len(words)}".encode()).digest(), "u1"
            )[:3]
    arrays: dict[str, Array] = {
        "tokens": tokens,
        "pattern": np.einsum("bic,bjc->bij", tokens, tokens)[:, None].repeat(2, 1),
        "pooled": np.nansum(tokens, (1, 2))[:, None],
    }
    info = {
        name: FeatureMapInfo(name, name, "M", 0, "out", "", array.shape, array.dtype.name, True)
        for name, array in arrays.items()
    }
    samples = tuple(ProcessedSample(len(own), tuple(range(len(own)))) for own in words)
    maps = FeatureMaps(
        arrays,
        info=info,
        stats={},
        expansions={},
        timing=ServerTiming(0, 0),
        model_id="m",
        processed=[ProcessedInput(samples, longest, pads_left=False, arguments=(), processor_digest="")],
    )
    return _Planned(maps, info)


class _Planned(FeatureMaps):
    """Feature maps that are also their own dry run."""

    def __init__(self, maps: FeatureMaps, info: dict[str, FeatureMapInfo]) -> None:
        vars(self).update(vars(maps))
        self.feature_maps = info


def computed(inputs: Sequence[Any] | Array, taps: Sequence[Any] = COLUMNS) -> FeatureMaps:
    """Compute what the fake model gives: rows of 5 float32 and of one int64."""
    contents = [sample if isinstance(sample, bytes) else np.asarray(sample).tobytes() for sample in inputs]
    if any(content.startswith(BAD) for content in contents):
        raise InvalidImageError("the bytes are no image")
    digests = [hashlib.sha256(content + bytes([len(contents)])).digest() for content in contents]
    width = 6 if contents[0].startswith(WIDE) else 5
    arrays: dict[str, Array] = {
        "wide/in": np.stack([np.frombuffer(digest, "u1")[:width] for digest in digests]).astype(np.float32),
        "code": np.stack([np.frombuffer(digest, "<i8")[0] for digest in digests]).reshape(-1, 1),
    }
    info = {
        name: FeatureMapInfo(name, name, "M", 0, "out", "", array.shape, array.dtype.name, True)
        for name, array in arrays.items()
    }
    return FeatureMaps(
        arrays,
        info=info,
        stats={},
        expansions={str(tap): (str(tap),) for tap in taps},
        timing=ServerTiming(0, 0),
        model_id="m",
    )


def write_samples(folder: Path, count: int, special: dict[int, bytes] | None = None) -> Path:
    """Write files that pass for images; those in `special` begin with these bytes."""
    folder.mkdir()
    for index in range(count):
        start = (special or {}).get(index, b"")
        (folder / f"{index:03}.jpg").write_bytes(start + f"sample {index}".encode() * 5)
    return folder


def tree(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
