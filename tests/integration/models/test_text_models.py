"""Text models in every service: bf16, streams, training, attribution, the caller's own process."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from safetensors.torch import save_file
from transformers import AutoTokenizer

import trocar
from tests.support.models import text_models
from tests.support.models.transformers_folders import family_inputs, save_family
from tests.support.servers.running_server import running_server

LAYER = "encoder.layer.1"
INPUTS = family_inputs("bert")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_family("bert", folder).requires_grad_(False)


@pytest.fixture(scope="module")
def client(folder: Path, model: Any) -> Iterator[trocar.Client]:
    source = f"hf:{folder}"
    tables: dict[str, Any] = {"bert": {"source": source}, "half": {"source": source, "dtype": "bf16"}}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def _tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def _hooked(model: Any, path: str, inputs: dict[str, Any]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        model(**_tensors(inputs))
    handle.remove()
    return seen[0]


def test_bf16_is_the_model_in_bf16(client: trocar.Client, folder: Path) -> None:
    from transformers import BertModel

    own = BertModel.from_pretrained(str(folder), dtype=torch.bfloat16).eval().requires_grad_(False)
    maps = client.extract("half", INPUTS, [LAYER])
    assert maps.info[LAYER].dtype == "bfloat16"
    np.testing.assert_array_equal(maps[LAYER], _hooked(own, LAYER, INPUTS).float().numpy())


def test_a_stream_and_a_call_give_the_same(client: trocar.Client, model: Any) -> None:
    batches = [family_inputs("bert", seed=seed) for seed in range(4)]
    with client.extract_stream("bert", batches, [LAYER]) as stream:
        found = [result.maps for result in stream]
    for maps, batch in zip(found, batches, strict=True):
        assert maps is not None
        np.testing.assert_array_equal(maps[LAYER], _hooked(model, LAYER, batch).numpy())


def test_a_model_is_hosted_in_the_callers_own_process(folder: Path, model: Any) -> None:
    with trocar.connect("local", models={"mine": f"hf:{folder}"}) as local:
        maps = local.extract("mine", INPUTS, [LAYER])
    np.testing.assert_array_equal(maps[LAYER], _hooked(model, LAYER, INPUTS).numpy())


def test_integrated_gradients_of_embeddings_are_captums(client: trocar.Client, model: Any) -> None:
    embeds = model.embeddings.word_embeddings(torch.from_numpy(INPUTS["input_ids"])).detach()
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64)

    def score(values: torch.Tensor) -> Any:
        return model(inputs_embeds=values, attention_mask=mask[:1].expand(len(values), -1)).pooler_output[
            :, 3
        ]

    theirs = IntegratedGradients(score).attribute(embeds, n_steps=16)
    of = trocar.value('/out["pooler_output"]', channels=[3])
    points, scale = np.polynomial.legendre.leggauss(16)
    alphas, weights = ((each / 2)[:, None, None].astype(np.float32) for each in (points + 1, scale))
    total = np.zeros(embeds.shape, np.float32)
    for row, one in enumerate(embeds.numpy()):
        path = alphas * one
        grads = client.gradients("bert", {"inputs_embeds": path}, of=of, at="/in(inputs_embeds)")
        found = next(iter(grads.values()))
        total[row] = (found * weights).sum(axis=0) * one
    np.testing.assert_allclose(total, theirs.numpy(), atol=1e-5)


def test_training_a_layer_of_a_text_model_is_torchs_own(client: trocar.Client, folder: Path) -> None:
    from transformers import BertModel

    own = BertModel.from_pretrained(str(folder)).eval().requires_grad_(False)
    own.pooler.requires_grad_().train()
    target = np.zeros((2, 8), np.float32)
    losses = [trocar.training.loss_term("mse", at='/out["pooler_output"]')]
    trainer = client.train("bert", trainable=["pooler"], losses=losses, optimizer=trocar.training.sgd(lr=0.1))
    with trainer:
        optimizer = torch.optim.SGD(own.pooler.parameters(), lr=0.1)
        for _ in range(3):
            loss = torch.nn.functional.mse_loss(
                own(**_tensors(INPUTS)).pooler_output, torch.from_numpy(target)
            )
            assert trainer.step(INPUTS, target).loss == pytest.approx(float(loss.detach()), rel=1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_embeddings_in_the_place_of_ids_are_one_input(client: trocar.Client) -> None:
    embeds = np.zeros((2, 7, 8), np.float32)
    with pytest.raises(trocar.errors.InputRejectedError, match="is missing"):
        client.extract("bert", {"attention_mask": INPUTS["attention_mask"]}, [LAYER])
    assert client.extract("bert", {"inputs_embeds": embeds}, [LAYER])[LAYER].shape == (2, 7, 8)


def test_a_mistyped_source_is_named(folder: Path) -> None:
    with pytest.raises(trocar.TrocarError, match=r"'hg:.*' is not a source; write timm:NAME"):
        trocar.connect("local", models={"mine": f"hg:{folder}"})


def test_relative_files_are_of_the_folder_where_a_local_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its working directory, and load the model again."""
    own: Any = text_models.bert().requires_grad_(False)
    for parameter in own.parameters():
        parameter.mul_(1.5)
    save_file(own.state_dict(), tmp_path / "own.safetensors")
    text_models.save_tokenizer(tmp_path / "tokens")
    table = {"factory": f"{text_models.__name__}:bert", "input_shape": (4,), "weights": "own.safetensors"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    models: Any = {"mine": {**table, "processor": Path("tokens")}}
    with trocar.connect("local", models=models) as local:
        monkeypatch.chdir(tmp_path / "elsewhere")
        local.unload("mine")
        local.load("mine")
        maps = local.extract("mine", ["the cat"], [f"model.{LAYER}"])
    load: Any = AutoTokenizer.from_pretrained
    inputs = load(tmp_path / "tokens")(["the cat"], return_tensors="np")
    np.testing.assert_array_equal(maps[f"model.{LAYER}"], _hooked(own, f"model.{LAYER}", inputs).numpy())
