"""Edits of a whole run: they reach every pass, and are part of what the output is of."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client._export.fakes import BAD, COLUMNS, FakeClient, tree, write_samples
from trocar._export.edit_descriptions import describe_edits
from trocar._request.stored.stored_edits import StoredEdits
from trocar.errors import OutputError, ServerBusyError, UnknownEditsError

EDIT = trocar.edit("layer3", "scale", 0.0, channels=[1, 2])
STORED = StoredEdits("m", "ablate-3", ("edit('layer3', 'zero')",), 0, datetime(2026, 1, 2, tzinfo=UTC))


def run(source: object, out: Path, client: FakeClient | None = None, **options: Any) -> trocar.DatasetReport:
    given: Any = client or FakeClient()
    return trocar.extract_dataset(given, "m", source, list(COLUMNS), out, **{"batch": 4, **options})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "photos", 11)


@pytest.mark.parametrize("edits", [EDIT, [EDIT], (EDIT,)])
def test_every_pass_has_the_edits(photos: Path, tmp_path: Path, edits: Any) -> None:
    client = FakeClient()
    run(photos, tmp_path / "out", client, edits=edits)
    assert client.edits == [(EDIT,)] * 3


def test_samples_that_are_sent_again_one_by_one_have_the_edits(tmp_path: Path) -> None:
    client = FakeClient()
    run(
        write_samples(tmp_path / "photos", 4, {2: BAD}), tmp_path / "out", client, edits=EDIT, on_error="skip"
    )
    assert len(client.edits) > 1
    assert set(client.edits) == {(EDIT,)}


def test_a_stopped_run_goes_on_with_the_same_edits(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerBusyError):
        run(
            photos,
            tmp_path / "out",
            FakeClient(fail_at=1, error=ServerBusyError("busy")),
            edits=[EDIT],
            shard_size=4,
        )
    again = trocar.edit("layer3", "scale", 0.0, channels=[1, 2])
    assert run(photos, tmp_path / "out", edits=[again], shard_size=4).resumed_at == 4
    run(photos, tmp_path / "whole", edits=[EDIT], shard_size=4)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (EDIT,)),
        ((EDIT,), ()),
        ((EDIT,), (trocar.edit("layer3", "scale", 1e-9, channels=[1, 2]),)),
        ((EDIT,), (EDIT, EDIT)),
        (
            (trocar.edit("fc", "add", np.array([1.0, 2.0])),),
            (trocar.edit("fc", "add", np.array([1.0, 3.0])),),
        ),
    ],
)
def test_a_run_with_other_edits_does_not_go_on(photos: Path, tmp_path: Path, before: Any, after: Any) -> None:
    run(photos, tmp_path / "out", edits=before)
    with pytest.raises(OutputError, match="edits"):
        run(photos, tmp_path / "out", edits=after)


def test_the_message_shows_both_edits(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out")
    with pytest.raises(OutputError, match=r"edits: was not there, is now .*channels=\[1, 2\]"):
        run(photos, tmp_path / "out", edits=EDIT)


def test_a_name_stands_for_what_is_stored_under_it(photos: Path, tmp_path: Path) -> None:
    client = FakeClient()
    client.stored = [STORED]
    run(photos, tmp_path / "out", client, edits="ablate-3")
    assert client.edits == [("ablate-3",)] * 3
    assert run(photos, tmp_path / "out", client, edits="ablate-3").resumed_at == 11
    client.stored = [replace(STORED, stored_at=datetime(2026, 1, 3, tzinfo=UTC))]
    with pytest.raises(OutputError, match="edits"):
        run(photos, tmp_path / "out", client, edits="ablate-3")


def test_an_unknown_name_is_refused_before_there_is_a_folder(photos: Path, tmp_path: Path) -> None:
    client = FakeClient()
    client.stored = [STORED]
    with pytest.raises(UnknownEditsError, match="did you mean ablate-3"):
        run(photos, tmp_path / "out", client, edits=[EDIT, "ablate-4"])
    assert not (tmp_path / "out").exists()
    assert client.calls == []


def test_the_description_of_an_edit_does_not_depend_on_who_made_it() -> None:
    from_json = trocar.Edit.from_json({"at": "layer3", "op": "scale", "factor": 0.0, "channels": [1, 2]})
    assert describe_edits([from_json], ()) == describe_edits([EDIT], ())
