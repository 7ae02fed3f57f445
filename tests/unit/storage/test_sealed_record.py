"""Sealed records."""

import math
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage import sealed_record
from trocar_server.storage.durable import DamagedError
from trocar_server.storage.sealed_record import Record, decoded, encoded, read_record, write_record


class Note(Record):
    text: str
    values: dict[str, object]


NOTE = Note(text='odd "ü\ud7ff\n\U0001f600', values={"loss": [0.1, 1e-300, -0.0], "n": None, "big": 2**70})
MORE = b'{"text": "", "values": {}, "more": 1}'


def test_a_record_comes_back(tmp_path: Path) -> None:
    write_record(tmp_path / "n.json", "note", NOTE)
    assert read_record(tmp_path / "n.json", "note", Note) == NOTE


def test_numbers_that_are_not_finite_come_back() -> None:
    values = decoded("note", Note, encoded("note", Note(text="", values={"a": [math.inf, math.nan]}))).values
    assert str(values) == "{'a': [inf, nan]}"


def test_every_bit_counts() -> None:
    content = encoded("note", NOTE)
    for position in range(len(content)):
        bent = bytearray(content)
        bent[position] ^= 1
        with pytest.raises(DamagedError):
            decoded("note", Note, bytes(bent))


def test_no_beginning_of_a_file_is_taken_for_the_whole() -> None:
    content = encoded("note", NOTE)
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            decoded("note", Note, content[:length])


def test_a_record_of_another_kind_is_damaged() -> None:
    with pytest.raises(DamagedError):
        decoded("trainer", Note, encoded("note", NOTE))


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"{}", b"[" * 100_000, b"\xff", b"9" * 5000, MORE],
)
def test_a_sealed_text_that_says_something_else_is_damaged(body: bytes) -> None:
    with pytest.raises(DamagedError):
        decoded("note", Note, sealed_record.seal("note", body))


def test_what_is_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_record, "MAX_RECORD_BYTES", 200)
    with pytest.raises(ServiceError) as error:
        write_record(tmp_path / "n.json", "note", Note(text="x" * 100, values={}))
    assert error.value.reason is ErrorReason.TRAINER_INVALID
    assert list(tmp_path.iterdir()) == []
