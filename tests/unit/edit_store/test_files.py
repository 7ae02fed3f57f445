"""One list as a file."""

from pathlib import Path

import pytest

from trocar_server.edit_store.files import StoredEntry, decoded, encoded, head_of
from trocar_server.storage.durable import DamagedError

ENTRY = StoredEntry("alice", "resnet18", "ablate-3", 1234.5, b"what \n it does", b"\x00\xff\n" * 9)


def test_a_file_says_what_was_written() -> None:
    assert decoded(encoded(ENTRY)) == ENTRY


@pytest.mark.parametrize("name", ["", "é\ud7ff\U0001f600", '"}\n{', "x" * 1000])
def test_odd_names_come_back(name: str) -> None:
    entry = StoredEntry(name, name, name, 0.0, b"", b"")
    assert decoded(encoded(entry)) == entry


def test_every_bit_counts() -> None:
    content = encoded(ENTRY)
    for position in range(len(content)):
        bent = bytearray(content)
        bent[position] ^= 1
        with pytest.raises(DamagedError):
            decoded(bytes(bent))


def test_no_beginning_of_a_file_is_taken_for_the_whole() -> None:
    content = encoded(ENTRY)
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            decoded(content[:length])
    with pytest.raises(DamagedError):
        decoded(content + b"x")


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"[]", b"{}", b"[" * 10_000, b'{"principal": 1}', b"\xff"],
)
def test_a_head_that_says_something_else_is_damaged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.edits"
    path.write_bytes(encoded(ENTRY)[:80] + line + b"\n")
    with pytest.raises(DamagedError):
        head_of(path)


def test_a_head_of_other_types_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.edits"
    path.write_bytes(encoded(ENTRY).replace(b'"tensor_bytes": 27', b'"tensor_bytes": "27"'))
    with pytest.raises(DamagedError):
        head_of(path)


def test_a_head_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "x.edits"
    path.write_bytes(encoded(ENTRY)[: -len(ENTRY.tensors)])
    head = head_of(path)
    assert (head.principal, head.model_id, head.name) == ("alice", "resnet18", "ablate-3")
    assert (head.description_bytes, head.tensor_bytes) == (len(ENTRY.description), len(ENTRY.tensors))
