"""Manifests and journals that somebody changed: our errors, and nothing outside the folder is touched."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.client._export.fakes import FakeClient
from trocar import extract_dataset, read_features
from trocar._export.manifest import NAME, differences
from trocar._export.open_shard import FOLDER
from trocar.errors import OutputError, SourceError, TrocarError

ROWS = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


def run(out: Path, *, shard_size: int = 2) -> None:
    extract_dataset(FakeClient(), "m", ROWS, ["code"], out, batch=1, shard_size=shard_size, format="npy")  # type: ignore[arg-type]


def stopped(out: Path) -> None:
    """Leave one complete shard and one in progress."""
    client = FakeClient(fail_at=3, error=TrocarError("gone"))
    with pytest.raises(TrocarError, match="gone"):
        extract_dataset(client, "m", ROWS, ["code"], out, batch=1, shard_size=2, format="npy")  # type: ignore[arg-type]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, item in items for place in places(item, (*path, key))]


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


WRONG: tuple[Any, ...] = (
    None,
    -1,
    1 << 70,
    1.5,
    True,
    "",
    "../x",
    "/etc/passwd",
    [],
    {},
    [{}],
    "O",
    float("nan"),
    [[1]],
)


@pytest.mark.parametrize("read", [run, read_features])
def test_a_changed_manifest_raises_nothing_but_our_errors(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    stopped(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "out")
    manifest = tmp_path / "out" / NAME
    text = manifest.read_text()
    (tmp_path / "x").write_text("untouched")
    for place in places(json.loads(text)):
        for value in WRONG:
            changed = json.loads(text)
            put(changed, place, value)
            manifest.write_text(json.dumps(changed))
            try:
                read(tmp_path / "out")
            except (OutputError, SourceError):
                continue
            shutil.rmtree(tmp_path / "out")  # a run that went on: begin anew
            shutil.copytree(tmp_path / "before", tmp_path / "out")
    assert (tmp_path / "x").read_text() == "untouched"


def test_a_changed_journal_is_done_again_or_refused(tmp_path: Path) -> None:
    run(tmp_path / "whole", shard_size=4)
    expected = read_features(tmp_path / "whole")["code"][:]
    chance, again = random.Random(6), 0
    for number in range(60):
        out = tmp_path / str(number)
        client = FakeClient(fail_at=3, error=TrocarError("gone"))
        with pytest.raises(TrocarError, match="gone"):
            extract_dataset(client, "m", ROWS, ["code"], out, batch=1, shard_size=4, format="npy")  # type: ignore[arg-type]
        journal = out / FOLDER / "journal.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        line = chance.randrange(1, len(lines))
        put(lines[line], chance.choice(places(lines[line])), chance.choice(WRONG))
        journal.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        try:
            run(out, shard_size=4)
        except OutputError as error:  # a form that could be, and is not that of the rows to come
            assert "--batch 1" in str(error) or "earlier ones have" in str(error)  # noqa: PT017 - most are done again
            continue
        np.testing.assert_array_equal(read_features(out)["code"][:], expected)
        again += 1
    assert again > 40


def test_json_of_any_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("[" * 100_000)
    with pytest.raises(OutputError, match="is not JSON"):
        run(tmp_path)


def test_many_differences_are_counted() -> None:
    found = differences({str(index): index for index in range(20_000)}, {"x": "y" * 10_000})
    assert len(found) == 9
    assert found[-1] == "and 19,993 more"
    assert sum(map(len, differences({}, {"x": "y" * 100_000}))) < 2_000
