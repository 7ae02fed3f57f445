"""A trainer whose base was configured otherwise since: restored, and it says what is no longer as it was."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import MODELS, batches
from tests.support.servers.running_server import running_server


def trainer_of(folder: Path, fields: Any, trainer_id: str = "") -> tuple[str, tuple[str, ...], Any]:
    """Create a trainer on a new server, or open one; return its id, its notices and its weights' reply."""
    models = {**MODELS, "tiny": {**MODELS["tiny"], **fields}}
    images, labels = batches(1)[0]
    with (
        running_server(models=models, data_dir=folder) as server,
        trocar.connect(server.address) as client,
    ):
        if not trainer_id:
            trainer = client.train("tiny", seed=1)
            trainer.step(images, labels)
            trainer.save()
        else:
            trainer = client.trainer(trainer_id)
        return trainer.trainer_id, trainer.info().notices, trainer.extract(images, ["fc"])["fc"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"categories": list("abcd")}, ""),
        ({"stages": {"late": "fc"}}, "its stages changed"),
        ({"stages": {"late": "fc"}, "numerics": "bf16"}, "its numerics, stages changed"),
    ],
)
def test_a_trainer_names_what_of_its_base_has_changed(tmp_path: Path, fields: Any, words: str) -> None:
    trainer_id, notices, before = trainer_of(tmp_path, {})
    assert notices == ()
    _, notices, after = trainer_of(tmp_path, fields, trainer_id)
    assert (words in notices[0]) if words else notices == ()
    np.testing.assert_array_equal(after, before)


def test_a_published_model_has_every_setting_of_its_base(tmp_path: Path) -> None:
    fields = {
        "numerics": "bf16",
        "warm_variants": [{"taps": ["fc"], "numerics": "fast"}],
        "merge": "caller",
        "stages": {"late": "fc"},
    }
    models = {"tiny": {**MODELS["tiny"], **fields}}
    own = {"model_id", "weights", "categories", "rebuilding"}
    for is_first in (True, False):
        with (
            running_server(models=models, data_dir=tmp_path, engine={"compile_after": 0}) as server,
            trocar.connect(server.address) as client,
        ):
            if is_first:
                client.train("tiny", seed=1).publish("tuned")
            specs = [server.engine.catalogue.get(name).spec for name in ("tiny", "tuned")]
            base, tuned = (
                {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)} for spec in specs
            )
            assert {name for name in base if base[name] != tuned[name]} <= own
            (taken,) = client.extract("tuned", batches(1)[0][0], ["late"]).values()
            assert taken.shape[1:] == (4,)
