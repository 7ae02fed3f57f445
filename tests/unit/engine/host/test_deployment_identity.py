"""Identity of a deployment: worked out once for each load, but for weights that may change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.models.transformers_folders import save_family
from tests.unit.engine.deployments import deployment
from trocar_server.engine.host import deployment_identity as identities
from trocar_server.engine.host.deployment import Deployment, make_deployment
from trocar_server.engine.host.deployment_identity import deployment_identity
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.models import load_model, make_training_copy, parse_model_argument


async def digest_of(model: Deployment, owner: DeviceThread, **settings: Any) -> str:
    return (await deployment_identity(model, [], owner, settings)).digest


async def test_it_is_worked_out_once(owner: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deployment(TinyNet, SHAPE)
    before = await digest_of(model, owner)
    monkeypatch.setattr(identities, "content_of", None)
    assert await digest_of(model, owner) == before


async def test_of_a_trainer_the_weights_are_as_they_are_now(owner: DeviceThread) -> None:
    base = deployment(TinyNet, SHAPE)
    module: Any = make_training_copy(base.hosted.module, [base.hosted.module.get_parameter("fc.weight")])
    trainer = make_deployment(replace(base.hosted, module=module.eval()), 1, 4, is_live=True)
    before = await digest_of(trainer, owner)
    assert before == await digest_of(base, owner)
    with torch.no_grad():
        module.fc.weight += 1
    assert await digest_of(trainer, owner) != before


async def test_weights_that_cannot_be_hashed_have_an_identity_of_one_load(owner: DeviceThread) -> None:
    model = deployment(TinyNet, SHAPE)
    assert (await deployment_identity(model, [], owner, {})).is_lasting
    model.hosted.module.register_buffer("sparse", torch.eye(3).to_sparse())
    odd = make_deployment(model.hosted, 1, 4)
    assert not (await deployment_identity(odd, [], owner, {})).is_lasting


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "scale_attn_by_inverse_layer_idx", True),
        ("tokenizer_config.json", "padding_side", "left"),
    ],
)
async def test_another_file_of_a_folder_is_another_model(
    owner: DeviceThread, tmp_path: Path, file: str, key: str, value: object
) -> None:
    """Neither the weights nor the structure tell how attention is scaled, or where a text is padded."""
    folder = tmp_path / "gpt2"
    save_family("gpt2", folder)

    def load() -> Deployment:
        spec = parse_model_argument(f"m=hf:{folder}")
        return make_deployment(load_model(spec, torch.device("cpu"), tmp_path / "cache"), 1, 4)

    before = await digest_of(load(), owner)
    assert await digest_of(load(), owner) == before
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), key: value}))
    assert await digest_of(load(), owner) != before


async def test_the_place_of_a_folder_does_not_count(owner: DeviceThread, tmp_path: Path) -> None:
    save_family("gpt2", tmp_path / "gpt2")
    digests = set()
    for place in ("here", "there"):
        folder = tmp_path / place / "gpt2"
        folder.parent.mkdir()
        (tmp_path / "gpt2").rename(folder)
        spec = parse_model_argument(f"m=hf:{folder}")
        model = make_deployment(load_model(spec, torch.device("cpu"), tmp_path / "cache"), 1, 4)
        digests.add(await digest_of(model, owner))
        folder.rename(tmp_path / "gpt2")
    assert len(digests) == 1
