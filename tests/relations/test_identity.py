"""What was kept of a model is not continued after its description changed: see `identities.py`."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.relations.identities import (
    BASE,
    CHANGES,
    KEPT,
    NEUTRAL,
    OTHER_CALLS,
    SETTINGS,
    answer,
    unnamed_fields,
    unnamed_settings,
    write_pictures,
)
from tests.support.servers.running_server import running_server


class Trial:
    """A model, what was kept of it, and the model after a change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pictures = folder / "pictures"
        write_pictures(self._pictures)
        self.before, self._begun = self._with(BASE, {}, self._begin)
        again, taken = self.changed()
        np.testing.assert_array_equal(again, self.before)
        assert all(taken.values()), f"without a change it is continued: {taken}"

    def changed(self, settings: Any = None, **fields: Any) -> tuple[Any, dict[str, bool]]:
        """Change fields of the model, and settings; return the answer, and whether what was kept is taken."""
        shutil.rmtree(self._folder / "work", ignore_errors=True)
        shutil.copytree(self._folder / "kept", self._folder / "work")
        return self._with({**BASE, **fields}, settings or {}, self._continue)  # type: ignore[no-any-return]

    def _with(self, table: dict[str, Any], settings: dict[str, Any], work: Any) -> Any:
        folder = self._folder / "data"
        with (
            running_server(models={"m": table}, device="cpu", data_dir=folder, **settings) as server,
            trocar.connect(server.address) as client,
        ):
            return work(client)

    def _begin(self, client: trocar.Client) -> Any:
        (self._folder / "kept").mkdir()
        kept = {
            name: each.begin(client, self._pictures, self._folder / "kept") for name, each in KEPT.items()
        }
        return answer(client, self._pictures), {**kept, "export": self._folder / "work" / "features"}

    def _continue(self, client: trocar.Client) -> Any:
        taken = {
            name: each.is_continued(client, self._pictures, self._begun[name]) for name, each in KEPT.items()
        }
        return answer(client, self._pictures), taken


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(tmp_path_factory.mktemp("identity"))


def test_every_field_of_a_model_is_named() -> None:
    assert unnamed_fields() == set()


def test_every_setting_of_a_server_is_named() -> None:
    assert unnamed_settings() == set()


@pytest.mark.parametrize("field", CHANGES)
def test_nothing_is_continued_after_a_change(trial: Trial, field: str) -> None:
    after, taken = trial.changed(**{field: CHANGES[field]})
    assert not np.array_equal(trial.before, after), "the change changes no answer"
    assert not any(taken.values()), taken


@pytest.mark.parametrize("field", OTHER_CALLS)
def test_nothing_is_continued_after_a_change_for_other_calls(
    trial: Trial, field: str, tmp_path: Path
) -> None:
    value = OTHER_CALLS[field]
    if field == "processor":
        value = tmp_path / value
        value.mkdir()
        (value / "tokenizer.json").write_text("{}")
    _, taken = trial.changed(**{field: value})
    assert not any(taken.values()), taken


@pytest.mark.parametrize("field", NEUTRAL)
def test_all_is_continued_after_a_change_that_makes_no_other_model(trial: Trial, field: str) -> None:
    after, taken = trial.changed(**{field: NEUTRAL[field][0]})
    np.testing.assert_array_equal(after, trial.before)
    assert all(taken.values()), taken


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_continued_after_a_change_of_the_server(trial: Trial, setting: str) -> None:
    after, taken = trial.changed(SETTINGS[setting])
    if setting.startswith("images."):  # numerics change values once a pass is compiled
        assert not np.array_equal(trial.before, after), "the change changes no answer"
    assert not any(taken.values()), taken
