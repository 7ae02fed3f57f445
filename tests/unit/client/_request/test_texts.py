"""Plain values as texts: which are taken for texts, which for files, and which are neither."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from trocar._request.inputs import wire_inputs
from trocar._request.texts import is_texts
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


def test_a_string_that_is_a_folder_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reviews").mkdir()
    monkeypatch.chdir(tmp_path)
    for value in ("reviews", ["reviews"]):
        with pytest.raises(IsADirectoryError, match=r"A folder where .* for a text write trocar\.texts"):
            wire_inputs(value)
    with pytest.raises(TypeError, match="'reviews', which is a folder here"):
        wire_inputs(["a text", "reviews"])
    texts: list[Any] = [trocar.texts(["reviews"]), ["Hello", "."], ["a", "..."], ("reviews", "a passage")]
    for given in texts:
        (argument,), _ = wire_inputs(given)
        assert argument.WhichOneof("value") == "texts"


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


@pytest.mark.parametrize(
    "text", ["好" * 100, "привет мир, как дела " * 7, "a long review. " * 30, "好* " * 90]
)
def test_texts_too_long_for_a_file_name_are_texts(text: str) -> None:
    """A name has at most 255 bytes, of which these characters take two or three each."""
    assert [entry.text for entry in trocar.texts([text]).entries] == [text]
    assert is_texts(text)
    assert is_texts([text, text])


def test_bfloat16_sound_and_token_ids_are_read_as_what_they_are() -> None:
    samples = torch.linspace(-1, 1, 9).bfloat16()
    _, payload = trocar.audio(samples, 16_000).clips[0]
    assert np.array_equal(np.frombuffer(payload, "<f4"), samples.float().numpy())
    with pytest.raises(TypeError, match="Tensor is no text"):
        trocar.texts([torch.ones(2, dtype=torch.bfloat16)])  # type: ignore[arg-type] # what is tested
