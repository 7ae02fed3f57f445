"""The manifest, also one that somebody else wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from trocar._export.manifest import NAME, Manifest, ShardEntry, differences, load
from trocar._export.open_shard import Failure
from trocar.errors import OutputError

ENTRY = ShardEntry("features-00000.zarr", 0, 4, 3, {"features-00000.zarr/x": {"bytes": 5, "sha256": "00"}})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = Manifest({"batch": 4}).with_shard(ENTRY, None, ())
    saved.save(tmp_path)
    assert load(tmp_path) == saved
    assert (saved.sample_count, saved.row_count, saved.byte_count) == (4, 3, 5)


def test_a_message_with_a_path_that_is_no_utf_8_is_saved(tmp_path: Path) -> None:
    failed = (Failure(0, "caf\\xe9.txt", "SourceError", "caf\udce9.txt is empty, not a text"),)
    saved = Manifest({"batch": 4}, failed=failed)
    saved.save(tmp_path)
    assert load(tmp_path) == saved


def test_there_need_not_be_one(tmp_path: Path) -> None:
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../other"},
        {"name": "/etc"},
        {"name": "manifest.json"},
        {"name": ""},
        {"files": {"features-00000.zarr/../../x": {"bytes": 5, "sha256": ""}}},
        {"files": {"/etc/passwd": {"bytes": 5, "sha256": ""}}},
        {"files": {"": {"bytes": 5, "sha256": ""}}},
        {"extra": 1},
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    Manifest({}).with_shard(ENTRY, None, ()).save(tmp_path)
    found = json.loads((tmp_path / NAME).read_text())
    found["shards"][0] |= change
    (tmp_path / NAME).write_text(json.dumps(found))
    with pytest.raises(OutputError, match=r"not a trocar manifest.*choose another --out"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"format_version": 2}', '"x"', "\x00"])
def test_other_content_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(OutputError, match="choose another --out"):
        load(tmp_path)


def test_differences_are_named_by_path() -> None:
    old = {"model": {"id": "a", "dtype": "f4"}, "taps": ["x"], "limit": None}
    new = {"model": {"id": "b", "dtype": "f4"}, "taps": ["x", "y"], "limit": None, "new": 1}
    assert differences(old, new) == [
        'model.id: was "a", is now "b"',
        'taps: was ["x"], is now ["x", "y"]',
        "new: was not there, is now 1",
    ]
    assert differences(old, old) == []


def test_parts_of_a_model_that_differ_are_named_in_place_of_its_digest() -> None:
    old = {"model": {"id": "a", "digest": "1", "parts": {"stages": "3", "code": "4", "weights": "5"}}}
    new = {"model": {"id": "a", "digest": "2", "parts": {"stages": "6", "weights": "5", "orient": "7"}}}
    assert differences(old, new) == ["model: other stages, code, orient"]
    assert differences(old, {"model": {**old["model"], "digest": "2"}}) == [
        'model.digest: was "1", is now "2"'
    ]


def test_a_folder_of_an_earlier_version_is_refused_in_words() -> None:
    """It has a digest of other things, or none."""
    facts = {"id": "a", "architecture": "m:M", "weights": "file", "parameter_count": 7, "dtype": "float32"}
    new = {"model": {**facts, "digest": "1", "parts": {"code": "2"}}}
    for old in (facts, {**facts, "digest": "1"}):
        lines = differences({"model": old}, new)
        assert len(lines) == 1
        assert lines[0].startswith("model: an earlier version began this folder")
