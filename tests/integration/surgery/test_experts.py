"""One expert of a mixture: its slice of the stacked parameters, in statistics, edits and gradients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.transformers_folders import family_inputs, save_family
from tests.support.servers.running_server import RunningServer, running_server

EXPERTS = "model.layers.0.mlp.experts"
STACKED = f"{EXPERTS}/param(down_proj)"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("experts")
    return {name: (root / name, save_family(name, root / name)) for name in ("mixtral", "qwen3_moe")}


@pytest.fixture(scope="module")
def server(models: dict[str, tuple[Path, Any]]) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, (folder, _) in models.items()}
    with running_server(models=tables, device="cpu") as running:
        yield running


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_statistics_of_one_expert_are_those_of_its_slice(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], name: str
) -> None:
    weight = models[name][1].get_parameter(f"{EXPERTS}.down_proj").detach().numpy()
    taps = [
        trocar.tap(STACKED, alias=f"expert {k}", index=np.s_[k], stats=["mean", "l2"])
        for k in range(len(weight))
    ]
    maps = client.extract(name, family_inputs(name), taps)
    for k, own in enumerate(weight):
        np.testing.assert_array_equal(maps[f"expert {k}"], own)
        assert maps.stats[f"expert {k}"].l2 == pytest.approx(np.linalg.norm(own.astype(np.float64)))
    assert np.abs(weight[0] - weight[1]).max() > 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_an_edit_of_one_expert_is_that_of_a_model_with_the_slice_changed(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], name: str
) -> None:
    model, inputs = models[name][1], family_inputs(name)
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    parameter = model.get_parameter(f"{EXPERTS}.down_proj")
    whole = parameter.detach().clone()
    with torch.inference_mode():
        parameter[1] = 0
        wanted = model(**tensors, use_cache=False).logits.numpy()
        parameter.copy_(whole)
        plain = model(**tensors, use_cache=False).logits.numpy()
    edits = [trocar.edit(STACKED, "zero", index=np.s_[1])]
    edited = client.extract(name, inputs, ["lm_head"], edits=edits)["lm_head"]
    np.testing.assert_allclose(edited, wanted, rtol=1e-5, atol=1e-7)
    assert not np.allclose(edited, plain, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        client.extract(name, inputs, ["lm_head"])["lm_head"], plain, rtol=1e-5, atol=1e-7
    )


def test_the_gradient_of_one_expert_is_a_slice_too(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    model, inputs = models["qwen3_moe"][1], family_inputs("qwen3_moe")
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    (wanted,) = torch.autograd.grad(
        model(**tensors, use_cache=False).logits.sum(), [model.get_parameter(f"{EXPERTS}.down_proj")]
    )
    at = trocar.tap(STACKED, alias="expert", index=np.s_[2])
    grads = client.gradients("qwen3_moe", inputs, of=trocar.value("lm_head"), at=[at])
    assert wanted[2].abs().max() > 0
    np.testing.assert_allclose(grads["expert"], wanted[2].numpy(), rtol=1e-4, atol=1e-6)
