"""Plain values as texts: which are taken for texts, which for files, and which are neither."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from trocar._request.inputs import wire_inputs
from trocar.errors import EmptyBatchError


@pytest.mark.parametrize(
    ("value", "forms"),
    [
        ("a sentence.", ["text"]),
        (["one", "two words"], ["text", "text"]),
        (("a question", "a passage"), ["pair"]),
        ([("a", "b"), "c d"], ["pair", "text"]),
        ([1, 2], ["token_ids"]),
        ([[1, 2], [3]], ["token_ids", "token_ids"]),
        (trocar.texts(["cat.jpg", "and/or"]), ["text", "text"]),
        (trocar.texts([np.array([1, 2])]), ["token_ids"]),
        (trocar.chat([("user", "hello")]), ["chat"]),
        (trocar.chat([[("user", "a")], [("user", "b")]]), ["chat", "chat"]),
        (trocar.chat([{"role": "user", "content": "b"}]), ["chat"]),
    ],
)
def test_values_become_texts(value: Any, forms: list[str]) -> None:
    (argument,), payloads = wire_inputs(value)
    assert [entry.WhichOneof("form") for entry in argument.texts.entries] == forms
    assert not payloads


def test_a_string_that_is_a_file_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "picture").write_bytes(b"bytes")
    monkeypatch.chdir(tmp_path)
    (argument,), _ = wire_inputs("picture")
    assert argument.WhichOneof("value") == "images"


def test_a_name_of_no_file_is_an_error_with_the_way_out() -> None:
    with pytest.raises(FileNotFoundError, match=r"trocar\.texts"):
        wire_inputs("nowhere.jpg")


def test_texts_beside_files_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'example\.com', which looks like the name of a file"):
        wire_inputs(["a text", "example.com"])


def test_sound_travels_as_float32() -> None:
    (argument,), (payload,) = wire_inputs(trocar.audio(np.arange(4, dtype=np.float64), 8_000))
    (clip,) = argument.audio.clips
    assert (clip.raw.sample_count, clip.raw.sample_rate) == (4, 8_000)
    assert np.frombuffer(payload, "<f4").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [trocar.texts, trocar.chat, lambda nothing: trocar.audio(nothing, 8_000)])
def test_nothing_is_no_batch(make: Any) -> None:
    with pytest.raises(EmptyBatchError):
        make([])


@pytest.mark.parametrize("sound", [np.arange(4), np.zeros((2, 4), np.float32), "a text"])
def test_what_is_no_clip_is_refused(sound: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="clip"):
        trocar.audio(sound, 8_000)
