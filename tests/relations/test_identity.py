"""What was kept of a model is not continued after its description changed: see `identities.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.relations.identities import BASE, CHANGES, KEPT, STILL_CONTINUED, picture, unnamed_fields
from tests.support.servers.running_server import running_server


def _with(table: dict[str, Any], work: Any, folder: Path) -> Any:
    with (
        running_server(models={"m": table}, device="cpu", data_dir=folder) as server,
        trocar.connect(server.address) as client,
    ):
        return work(client)


def test_every_field_of_a_model_is_named() -> None:
    assert unnamed_fields() == set()


@pytest.mark.parametrize("field", CHANGES)
def test_nothing_is_continued_after_a_change(tmp_path: Path, field: str) -> None:
    changed = {**BASE, field: CHANGES[field]}

    def first(client: trocar.Client) -> Any:
        value = client.extract("m", picture(), ["early"])
        return next(iter(value.values())), {name: kept.begin(client, tmp_path) for name, kept in KEPT.items()}

    def second(client: trocar.Client) -> Any:
        value = client.extract("m", picture(), ["early"])
        taken = {name: kept.is_continued(client, tmp_path, begun[name]) for name, kept in KEPT.items()}
        return next(iter(value.values())), taken

    before, begun = _with(BASE, first, tmp_path / "data")
    _, again = _with(BASE, second, tmp_path / "data")
    after, taken = _with(changed, second, tmp_path / "data")
    assert not np.array_equal(before, after), "the change changes no answer"
    assert all(again.values()), "without a change it is continued"
    for name, is_taken in taken.items():
        if (name, field) in STILL_CONTINUED:
            assert is_taken, "mended: remove its line from identities.py"
        else:
            assert not is_taken
