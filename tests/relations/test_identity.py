"""What was kept of a model is not continued after its description changed: see `identities.py`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.relations.identities import (
    BASE,
    CHANGES,
    COMPILING,
    KEPT,
    NEUTRAL,
    OTHER_CALLS,
    PARTS,
    PREPROCESSING,
    SETTINGS,
    Running,
    answer,
    fresh,
    kept_in_memory,
    unnamed_fields,
    unnamed_settings,
    write_pictures,
)
from tests.support.servers.building import build_here_from_the_start
from tests.support.servers.running_server import running_server
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.engine.compiled.variant_building import VariantBuilder
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.reply_cache import ReplyCache
from trocar_server.models.identity import NOT_IDENTITY, Content, identity


class Trial:
    """A model, what was kept of it, and the model after a change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pictures = folder / "pictures"
        write_pictures(self.pictures)
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
        settings = {**settings, "engine": {**COMPILING, **settings.get("engine", {})}}
        with (
            running_server(models={"m": table}, device="cpu", data_dir=folder, **settings) as server,
            trocar.connect(server.address) as client,
        ):
            return work(Running(server, client))

    def _begin(self, running: Running) -> Any:
        (self._folder / "kept").mkdir()
        kept = {
            name: each.begin(running, self.pictures, self._folder / "kept") for name, each in KEPT.items()
        }
        return answer(running.client, self.pictures), {**kept, "export": self._folder / "work" / "features"}

    def _continue(self, running: Running) -> Any:
        taken = {
            name: each.is_continued(running, self.pictures, self._begun[name]) for name, each in KEPT.items()
        }
        return answer(running.client, self.pictures), taken


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with pytest.MonkeyPatch.context() as patch:
        build_here_from_the_start(patch)
        yield Trial(tmp_path_factory.mktemp("identity"))


def test_every_field_of_a_model_is_named() -> None:
    assert unnamed_fields() == set()


def test_every_setting_of_a_server_is_named() -> None:
    assert unnamed_settings() == set()


@pytest.mark.parametrize("field", CHANGES)
def test_nothing_is_continued_after_a_change(trial: Trial, field: str) -> None:
    after, taken = trial.changed(**{field: CHANGES[field]})
    assert not np.array_equal(trial.before, after), "the change changes no answer"
    assert not any(taken.values()), taken


@pytest.mark.parametrize("field", PREPROCESSING)
def test_nothing_is_continued_after_a_change_of_preprocessing(trial: Trial, field: str) -> None:
    preprocessing = {**BASE["preprocessing"], field: PREPROCESSING[field]}
    after, taken = trial.changed(preprocessing=preprocessing)
    assert not np.array_equal(trial.before, after), "the change changes no answer"
    assert not any(taken.values()), taken


@pytest.mark.parametrize("field", PARTS)
def test_every_part_of_a_field_is_in_the_identity(field: str) -> None:
    _, make, changes = PARTS[field]
    tables = [make({}), *(make({name: value}) for name, value in changes.items())]
    specs = [model_spec("m", ModelConfig(**{**BASE, field: table})) for table in tables]
    digests = {identity(spec, {}, Content()).digest for spec in specs}
    assert len(digests) == len(tables)


@pytest.mark.parametrize("field", [*CHANGES, *NEUTRAL])
def test_a_reload_answers_with_the_changed_model(trial: Trial, field: str) -> None:
    """Replies that were kept, and prepared calls, are of the model as it is now, or refused."""
    change = CHANGES[field] if field in CHANGES else NEUTRAL[field][0]
    _reload_answers(trial.pictures, field, change, is_other=field in CHANGES)


def _reload_answers(pictures: Path, field: str, change: Any, *, is_other: bool) -> None:
    limits = {"feature_cache_bytes": 1 << 24}
    with (
        running_server(models={"m": BASE}, device="cpu", limits=limits) as server,
        trocar.connect(server.address) as client,
    ):
        running = Running(server, client)
        answers, before = kept_in_memory(running, pictures), fresh(running, pictures)
        lifecycle = server.app.lifecycle
        plain = lifecycle.config.model_dump(exclude_unset=True)
        lifecycle.reread = lambda: ServerConfig(**{**plain, "models": {"m": {**BASE, field: change}}})
        client.reload_config()
        after, given = fresh(running, pictures), answers()
    assert any(not np.array_equal(before[name], after[name]) for name in before) == is_other
    for name, value in given.items():
        np.testing.assert_array_equal(value, after[name], name)


def test_a_field_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_close(*_: Any) -> str:  # a second guard of variants: they are compared with the model
        return ""

    monkeypatch.setitem(NOT_IDENTITY, "options", "is a planted fault")
    monkeypatch.setattr(VariantBuilder, "_problem", is_close)
    build_here_from_the_start(monkeypatch)
    _, taken = Trial(tmp_path).changed(options=CHANGES["options"])
    assert all(taken.values()), taken


def test_a_reply_of_the_model_before_a_reload_is_noticed(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplyCache, "drop", lambda *_: None)
    monkeypatch.setattr(Deployment, "version", "equal", raising=False)
    with pytest.raises(AssertionError, match="reply"):
        _reload_answers(trial.pictures, "options", CHANGES["options"], is_other=True)


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
