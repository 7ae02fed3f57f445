"""New lengths, batch sizes and image sizes: planned and served without another recorded pass."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import trocar
from tests.support.models.sized_models import T5, Bert, Gpt, Halves
from tests.support.models.transformers_folders import save_family
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom, rebuilt
from trocar_server.engine.host import predictions
from trocar_server.engine.host.recordings import ModelRecorder
from trocar_server.surgery.recording.symbolic import import_symbolic_parts

_REQUESTS, _PADDED_REQUESTS = 125, 20

_KINDS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "bert": (Bert, (8,), "model.encoder"),
    "gpt": (Gpt, (8,), "model.h.1"),
    "t5": (T5, (8,), "model.encoder.block.1"),
    "halves": (Halves, (3, 64, 48), "pool"),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no symbolic recording be given up for its time, on a machine with other work, or begin late."""
    import_symbolic_parts()
    monkeypatch.setattr(predictions, "_LIMIT_S", 60.0)


def drawn(model_id: str, rng: random.Random) -> np.ndarray[Any, Any]:
    """Return inputs of a random batch and length, or of a random image size."""
    rows = rng.randint(1, 6)
    numbers = np.random.default_rng(rng.randint(0, 1 << 30))
    if model_id == "halves":
        return numbers.random((rows, 3, rng.randint(40, 90), rng.randint(40, 90)), np.float32)
    return numbers.integers(0, 15, (rows, rng.randint(2, 64)))


def prepare(server: RunningServer, client: trocar.Client, model_id: str, tap: str) -> None:
    """Send two sizes of one row and two of several, and wait for what they make the server prepare."""
    for rows in (1, 3):
        for size in (44, 51):
            shape = (rows, 3, size, size + 7) if model_id == "halves" else (rows, size)
            dtype = np.float32 if model_id == "halves" else np.int64
            client.extract(model_id, np.ones(shape, dtype), tap)
    server.on_owner(lambda: None)


@pytest.mark.parametrize("model_id", _KINDS)
def test_random_sizes_are_served_without_another_recording(serve: Serve, model_id: str) -> None:
    kind, shape, tap = _KINDS[model_id]
    server, rng = serve(models={model_id: custom(kind, shape)}), random.Random(3)
    with trocar.connect(server.address) as client:
        prepare(server, client, model_id, tap)
        host = server.engine.deployment(model_id)
        before = host.recorded_count
        for _ in range(_REQUESTS):
            inputs = drawn(model_id, rng)
            plan = client.plan(model_id, inputs, tap)
            maps = client.extract(model_id, inputs, tap)
            assert {name: found.shape for name, found in plan.feature_maps.items()} == {
                name: found.shape for name, found in maps.items()
            }
            assert plan.reply_bytes == sum(found.nbytes for found in maps.values())
        assert host.recorded_count == before


@pytest.mark.parametrize(("family", "path"), [("bert", "encoder.layer.1"), ("llama", "model.layers.1")])
def test_masks_with_padding_are_served_without_another_recording(
    serve: Serve, family: str, path: str, tmp_path: Path
) -> None:
    model: Any = save_family(family, tmp_path).requires_grad_(False)
    server, rng = serve(models={family: {"source": f"hf:{tmp_path}"}}), random.Random(5)
    with trocar.connect(server.address) as client:
        for _ in range(2):
            client.extract(family, padded(rng), path)
        server.on_owner(lambda: None)
        before = server.engine.deployment(family).recorded_count
        for _ in range(_PADDED_REQUESTS):
            inputs = padded(rng)
            plan, maps = client.plan(family, inputs, path), client.extract(family, inputs, path)
            assert plan.reply_bytes == maps[path].nbytes
            assert np.array_equal(maps[path], hooked(model, path, inputs))
        assert server.engine.deployment(family).recorded_count == before


@pytest.mark.parametrize(("family", "path"), [("bert", "encoder.layer.1"), ("llama", "model.layers.1")])
def test_attention_of_new_lengths_is_served_without_another_recording(
    serve: Serve, family: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of patterns on padded batches, too, whose masks the models read."""
    recorded: list[str] = []
    for method in ("record", "record_data"):
        monkeypatch.setattr(ModelRecorder, method, noted(recorded, method))
    save_family(family, tmp_path)
    server, rng = serve(models={family: {"source": f"hf:{tmp_path}"}}), random.Random(5)
    tap = f"{path}/pattern"
    kind: Any = {"bert": transformers.BertModel, "llama": transformers.LlamaForCausalLM}[family]
    eager = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with trocar.connect(server.address) as client:
        for _ in range(2):
            client.extract(family, padded(rng), tap)
        server.on_owner(lambda: None)
        assert recorded
        recorded.clear()
        for _ in range(_PADDED_REQUESTS):
            inputs = padded(rng)
            plan, maps = client.plan(family, inputs, tap), client.extract(family, inputs, tap)
            assert plan.reply_bytes == maps[tap].nbytes
            with torch.inference_mode():
                given = {name: torch.from_numpy(array) for name, array in inputs.items()}
                expected = eager(**given, output_attentions=True).attentions[1].numpy()
            rows = inputs["attention_mask"].astype(bool)  # kernels fill those of padding as they like
            found = maps[tap].transpose(0, 2, 1, 3)[rows]
            np.testing.assert_allclose(found, expected.transpose(0, 2, 1, 3)[rows], rtol=1e-4, atol=1e-6)
        assert not recorded


def noted(names: list[str], method: str) -> Callable[..., Any]:
    """Return a method of recorders that notes its name when it is called."""
    own = getattr(ModelRecorder, method)

    def called(*given: Any) -> Any:
        names.append(method)
        return own(*given)

    return called


def padded(rng: random.Random) -> dict[str, np.ndarray[Any, Any]]:
    """Return token ids of random lengths, padded, and their mask."""
    lengths = [rng.randint(2, 60) for _ in range(rng.randint(2, 5))]
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": mask * rng.randint(4, 29), "attention_mask": mask}


def hooked(model: Any, path: str, inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return what a module of a model in this process returns."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    with handle, torch.inference_mode():
        model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return seen[0].numpy()


def test_values_of_a_predicted_size_are_those_of_a_hook(serve: Serve) -> None:
    server = serve(models={"halves": custom(Halves, (3, 64, 48))})
    with trocar.connect(server.address) as client:
        prepare(server, client, "halves", "conv")
        image = np.random.default_rng(0).standard_normal((2, 3, 70, 61)).astype(np.float32)
        found = client.extract("halves", image, ["conv", "pool"])
        signature = list(server.engine.deployment("halves").recordings)[-1]
        assert server.engine.deployment("halves").recordings[signature].is_predicted
    model, seen = rebuilt(Halves), {}
    for name in ("conv", "pool"):  # `relu` writes into the output of `conv`
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.clone()})
        )
    with torch.no_grad():
        model(torch.from_numpy(image))
    for name, value in seen.items():
        assert np.array_equal(found[name], value.numpy())
