"""LoRA adapters of trainers: gradients, steps and files equal PEFT's on the same seeds."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

import trocar
from tests.support.models.transformers_folders import FAMILIES, save_family
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main
from trocar.errors import InvalidArgumentError, TrainerInvalidError, UnknownTrainerError
from trocar_server.training import trainer_builder

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
RANKS = {"*.c_attn": 4, "*.mlp.*": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt2")
    save_family("gpt2", root)
    return root


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {"gpt2": {"source": f"hf:{folder}"}}
    with running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_trainers(running: RunningServer) -> Iterator[None]:
    yield
    for token in (None, "ann", "bob"):
        with trocar.connect(running.address, token=token) as client:
            for info in client.trainers():
                client.trainer(info.trainer_id).close()


def base(folder: Path) -> Any:
    kind: Any = FAMILIES["gpt2"][0]
    return kind.from_pretrained(folder, attn_implementation="sdpa")


def theirs(folder: Path, **options: Any) -> Any:
    """Make the same adapter with PEFT alone."""
    config: Any = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "mlp.c_fc", "mlp.c_proj"],
        rank_pattern={"mlp.c_fc": 2, "mlp.c_proj": 2},
        fan_in_fan_out=True,
        **options,
    )
    model = base(folder)
    torch.manual_seed(7)
    return peft.get_peft_model(model, config)


def named(model: Any) -> dict[str, Any]:
    prefix = "base_model.model."
    return {name.removeprefix(prefix): p for name, p in model.named_parameters() if p.requires_grad}


def assert_steps_of_peft(trainer: Any, model: Any) -> None:
    """Compare losses and gradients of three steps; the first gradients of the A matrices are zeros."""
    optimizer = torch.optim.SGD(named(model).values(), lr=0.01)
    for _ in range(3):
        result = trainer.forward_backward({"input_ids": IDS}, IDS)
        loss = model(input_ids=torch.from_numpy(IDS), labels=torch.from_numpy(IDS)).loss
        loss.backward()
        assert result.loss == loss.item()
        gradients = trainer.parameter_gradients()
        own = named(model)
        assert set(gradients) == set(own)
        for name, parameter in own.items():
            np.testing.assert_array_equal(gradients[name], parameter.grad.numpy(), err_msg=name)
        trainer.optimizer_step()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_equal_those_of_peft_bit_for_bit(client: trocar.Client, folder: Path) -> None:
    adapter = trocar.training.lora(RANKS, alpha=16, dropout=0.1)
    trainer = client.train("gpt2", lora=adapter, losses="causal_lm", seed=7)
    model = theirs(folder, lora_alpha=16, lora_dropout=0.1).train()
    torch.manual_seed(7)
    assert_steps_of_peft(trainer, model)
    assert trainer.info().trainable_element_count == sum(p.numel() for p in named(model).values())


def test_the_model_itself_stays(client: trocar.Client, folder: Path) -> None:
    trainer = client.train("gpt2", lora=4, losses="causal_lm", optimizer=trocar.training.adamw(lr=0.1))
    before = client.extract("gpt2", {"input_ids": IDS}, ["lm_head"])["lm_head"]
    first = trainer.step({"input_ids": IDS}, IDS).loss
    losses = [trainer.step({"input_ids": IDS}, IDS).loss for _ in range(10)]
    assert losses[-1] < first
    np.testing.assert_array_equal(client.extract("gpt2", {"input_ids": IDS}, ["lm_head"])["lm_head"], before)
    changed = client.extract(trainer.trainer_id, {"input_ids": IDS}, ["lm_head"])["lm_head"]
    assert not np.array_equal(changed, before)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lora": trocar.training.lora({"*.q_prj": 4})}, "'\\*.q_prj' matches no linear layer"),
        ({"lora": trocar.training.lora({"*.c_attn": 8193})}, "lora.ranks\\[0\\].rank"),
        ({"lora": 4, "trainable": "lm_head"}, "trainable: with an adapter"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(
    client: trocar.Client, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TrainerInvalidError, match=problem):
        client.train("gpt2", losses="causal_lm", **options)


def test_a_rank_of_an_adapter_is_at_least_one(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="a rank is 0; it is at least 1"):
        client.train("gpt2", losses="causal_lm", lora=trocar.training.lora({"*.c_attn": 0}))


def test_peft_loads_what_was_exported(client: trocar.Client, folder: Path, tmp_path: Path) -> None:
    adapter = trocar.training.lora(RANKS, alpha={"*.c_attn": 16, "*.mlp.*": 4})
    trainer = client.train("gpt2", lora=adapter, losses="causal_lm", optimizer=trocar.training.adamw(lr=0.1))
    for _ in range(3):
        trainer.step({"input_ids": IDS}, IDS)
    model: Any = peft.PeftModel.from_pretrained(base(folder), trainer.export_adapter(tmp_path / "adapter"))
    with torch.inference_mode():
        own = model.eval()(input_ids=torch.from_numpy(IDS)).logits.numpy()
    np.testing.assert_array_equal(trainer.predict({"input_ids": IDS}), own)


def test_an_adapter_of_peft_is_loaded_and_survives_a_restore(
    client: trocar.Client, folder: Path, tmp_path: Path
) -> None:
    model = theirs(folder, lora_alpha=16, alpha_pattern={"mlp.c_fc": 4}, init_lora_weights=False).eval()
    model.save_pretrained(tmp_path)
    trainer = client.train("gpt2", lora=trocar.training.lora_from(tmp_path), losses="causal_lm")
    with torch.inference_mode():
        own = model(input_ids=torch.from_numpy(IDS)).logits.numpy()
    np.testing.assert_array_equal(trainer.predict({"input_ids": IDS}), own)
    trainer.step({"input_ids": IDS}, IDS)
    trainer.restore()
    np.testing.assert_array_equal(trainer.predict({"input_ids": IDS}), own)


def test_an_adapter_is_not_published(client: trocar.Client) -> None:
    trainer = client.train("gpt2", lora=4, losses="causal_lm")
    with pytest.raises(InvalidArgumentError, match="cannot be published"):
        trainer.publish("own")
    assert "own" not in {model.model_id for model in client.models()}


def test_a_head_goes_along_with_the_adapter(client: trocar.Client, tmp_path: Path) -> None:
    options: Any = {"head": trocar.training.head(30, path="lm_head"), "losses": "causal_lm", "seed": 3}
    trainer = client.train("gpt2", lora=trocar.training.lora({"*.c_attn": 2}), **options)
    assert {name for name in trainer.info().trainable if "lora" not in name} == {
        "lm_head.weight",
        "lm_head.bias",
    }
    trainer.step({"input_ids": IDS}, IDS)
    trainer.export_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]
    again = client.train("gpt2", lora=trocar.training.lora_from(tmp_path), **options)
    inputs = {"input_ids": IDS}
    np.testing.assert_array_equal(again.predict(inputs), trainer.predict(inputs))


def test_streams_plans_gradients_and_the_command_line_take_an_adapter(
    client: trocar.Client,
    running: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options: Any = {"losses": "causal_lm", "optimizer": trocar.training.adamw(lr=0.1)}
    trainer = client.train("gpt2", lora=trocar.training.lora(4, name="style"), **options)
    inputs, at = {"input_ids": IDS}, "lm_head"
    trainer.step(inputs, IDS)
    expected = trainer.extract(inputs, [at])[at]
    assert not np.array_equal(expected, client.extract("gpt2", inputs, [at])[at])
    with client.extract_stream("gpt2", [inputs] * 2, [at], adapter="style") as stream:
        for result in stream:
            np.testing.assert_array_equal(result.unwrap()[at], expected)
    inside = "transformer.h.0.attn.c_attn.lora_A.default"
    assert inside in client.plan("gpt2", inputs, [inside], adapter="style").feature_maps
    of = trocar.value(at)
    grads = client.gradients("gpt2", inputs, of=of, at=["transformer.h.0"], adapter="style")
    own = client.gradients(trainer.trainer_id, inputs, of=of, at=["transformer.h.0"])
    np.testing.assert_array_equal(grads["transformer.h.0"], own["transformer.h.0"])
    with pytest.raises(UnknownTrainerError, match="no adapter 'other'"):
        list(client.extract_stream("gpt2", [inputs], [at], adapter="other"))

    monkeypatch.setenv("TROCAR_SERVER", running.address)
    rows, out = tmp_path / "ids.npy", tmp_path / "logits.safetensors"
    np.save(rows, IDS)
    words = ["extract", "gpt2", str(rows), "--tap", at, "--adapter", "style"]
    for target in (out, tmp_path / "folder"):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--out", str(target)])
        assert not stopped.value.code, capsys.readouterr().err
    np.testing.assert_array_equal(load_file(out)[at], expected)
    np.testing.assert_array_equal(trocar.read_features(tmp_path / "folder")[at][:], expected)


def test_prepared_calls_take_an_adapter_and_edits_that_are_stored_for_it(
    folder: Path, tmp_path: Path
) -> None:
    models, host = {"gpt2": {"source": f"hf:{folder}"}}, f"unix:{tmp_path}/s"
    with (
        running_server(models=models, device="cpu", data_dir=tmp_path / "data", host=host) as server,
        trocar.connect(server.app.rpc.address) as client,
    ):
        trainer = client.train("gpt2", lora=trocar.training.lora(4, name="style"), losses="causal_lm")
        client.store_edits(trainer.trainer_id, "half", trocar.edit("transformer.h.0.mlp", "scale", 0.5))
        inputs: Any = {"input_ids": IDS}
        options: Any = {"adapter": "style", "edits": "half"}
        expected = client.extract("gpt2", inputs, "lm_head", **options)["lm_head"]
        with client.prepare("gpt2", inputs, "lm_head", **options) as prepared:
            np.testing.assert_array_equal(prepared(inputs)["lm_head"], expected)
            assert prepared.is_shared


def test_an_adapter_of_another_shape_is_refused(client: trocar.Client, folder: Path, tmp_path: Path) -> None:
    theirs(folder).save_pretrained(tmp_path)
    trainer = client.train("gpt2", lora=4, losses="causal_lm")
    with pytest.raises(TrainerInvalidError, match="is missing in either"):
        trainer.load_adapter(tmp_path)


def test_peft_is_imported_beside_the_thread_that_owns_the_device(
    client: trocar.Client, running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def importing() -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(trainer_builder, "peft_library", importing)
    client.train("gpt2", lora=4, losses="causal_lm")
    assert len(threads) == 1
    assert running.on_owner(lambda: threading.current_thread().name) not in threads


def test_adapters_on_one_base_are_chosen_per_call_and_never_mixed(client: trocar.Client) -> None:
    inputs, taps = {"input_ids": IDS}, ["lm_head"]
    options: Any = {"losses": "causal_lm", "optimizer": trocar.training.adamw(lr=0.1)}
    trainers = {
        name: client.train("gpt2", lora=trocar.training.lora(4, name=name), seed=seed, **options)
        for seed, name in enumerate(["one", "two"])
    }
    for trainer in trainers.values():
        trainer.step(inputs, IDS)
    alone = {name: trainer.extract(inputs, taps)["lm_head"] for name, trainer in trainers.items()}
    plain = client.extract("gpt2", inputs, taps)["lm_head"]
    with ThreadPoolExecutor(6) as pool:
        calls = [
            (name, pool.submit(client.extract, "gpt2", inputs, taps, adapter=name))
            for name in ("one", "", "two") * 8
        ]
        for name, call in calls:
            np.testing.assert_array_equal(call.result()["lm_head"], alone.get(name, plain))
    assert not np.array_equal(alone["one"], alone["two"])
    with pytest.raises(TrainerInvalidError, match="has an adapter 'one'"):
        client.train("gpt2", lora=trocar.training.lora(2, name="one"), losses="causal_lm")
    with pytest.raises(UnknownTrainerError, match="no adapter 'three' on model 'gpt2'; available: one, two"):
        client.extract("gpt2", inputs, taps, adapter="three")
    for trainer in trainers.values():
        trainer.close()


def test_an_adapter_belongs_to_who_trained_it(running: RunningServer) -> None:
    with (
        trocar.connect(running.address, token="ann") as ann,
        trocar.connect(running.address, token="bob") as bob,
    ):
        inputs, adapter = {"input_ids": IDS}, trocar.training.lora(4, name="own")
        trainer = ann.train("gpt2", lora=adapter, losses="causal_lm")
        with pytest.raises(UnknownTrainerError, match="it has none"):
            bob.extract("gpt2", inputs, ["lm_head"], adapter="own")
        trainer.step(inputs, IDS)
        other = bob.train("gpt2", lora=adapter, losses="causal_lm", seed=1)
        other.step(inputs, IDS)
        values = [one.extract("gpt2", inputs, ["lm_head"], adapter="own")["lm_head"] for one in (ann, bob)]
        np.testing.assert_array_equal(values[0], trainer.extract(inputs, ["lm_head"])["lm_head"])
        np.testing.assert_array_equal(values[1], other.extract(inputs, ["lm_head"])["lm_head"])
        assert not np.array_equal(values[0], values[1])


def test_a_named_adapter_and_its_weights_survive_a_restart(folder: Path, tmp_path: Path) -> None:
    options: Any = {"models": {"gpt2": {"source": f"hf:{folder}"}}, "device": "cpu", "data_dir": tmp_path}
    inputs, taps = {"input_ids": IDS}, ["lm_head"]
    with running_server(**options) as server, trocar.connect(server.address) as client:
        adapter = trocar.training.lora(RANKS, dropout=0.1, name="kept")
        trainer = client.train(
            "gpt2", lora=adapter, losses="causal_lm", optimizer=trocar.training.adamw(lr=0.1)
        )
        trainer.step(inputs, IDS)
        trainer.save()
        before = client.extract("gpt2", inputs, taps, adapter="kept")["lm_head"]
        expected = trainer.step(inputs, IDS).loss
    with running_server(**options) as server, trocar.connect(server.address) as client:
        again = client.trainer(trainer.trainer_id)
        again.restore(1)
        np.testing.assert_array_equal(client.extract("gpt2", inputs, taps, adapter="kept")["lm_head"], before)
        assert again.step(inputs, IDS).loss == expected


EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[trocar.Client, Path]]:
    """A mixture of experts, whose weights are stacked in parameters."""
    folder = tmp_path_factory.mktemp("moe")
    save_family("qwen3_moe", folder)
    models = {"moe": {"source": f"hf:{folder}"}}
    with (
        running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as server,
        trocar.connect(server.address) as connected,
    ):
        yield connected, folder


def experts_of_peft(folder: Path) -> Any:
    kind: Any = FAMILIES["qwen3_moe"][0]
    config: Any = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in EXPERTS],
        rank_pattern={f"mlp.experts.{name}": 2 for name in EXPERTS},
    )
    model = kind.from_pretrained(folder, attn_implementation="sdpa")
    torch.manual_seed(7)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")  # PEFT 0.21, wrongly
def test_stacked_experts_are_adapted_as_by_peft(moe: tuple[trocar.Client, Path], tmp_path: Path) -> None:
    (client, folder), inputs = moe, {"input_ids": IDS}
    adapter = trocar.training.lora({"*.q_proj": 4, "*.experts.*": 2}, alpha=16, name="sharp")
    trainer = client.train("moe", lora=adapter, losses="causal_lm", seed=7)
    model = experts_of_peft(folder).train()
    own = named(model)
    assert {name.rpartition(".lora_")[0].rpartition("mlp.")[2] for name in own if "mlp" in name} == {
        "experts",
        "experts.base_layer",
    }
    assert_steps_of_peft(trainer, model)
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.from_numpy(IDS)).logits.numpy()
    np.testing.assert_array_equal(
        client.extract("moe", inputs, "lm_head", adapter="sharp")["lm_head"], expected
    )
    # files of either end are read by the other one, with whole names of parameters and with their ends
    trainer.export_adapter(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    kind: Any = FAMILIES["qwen3_moe"][0]
    plain = kind.from_pretrained(folder, attn_implementation="sdpa")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    with torch.inference_mode():
        np.testing.assert_array_equal(again(input_ids=torch.from_numpy(IDS)).logits.numpy(), expected)
    for saved in ("ours", "theirs"):
        loaded = client.train("moe", lora=trocar.training.lora_from(tmp_path / saved), losses="causal_lm")
        np.testing.assert_array_equal(loaded.extract(inputs, "lm_head")["lm_head"], expected)


def test_a_single_rank_is_for_layers(moe: tuple[trocar.Client, Path]) -> None:
    """As PEFT's `all-linear`: without stacked experts, so with dropout, too."""
    trainer = moe[0].train("moe", lora=trocar.training.lora(2, dropout=0.1), losses="causal_lm")
    trainer.forward_backward({"input_ids": IDS}, IDS)
    found = set(trainer.parameter_gradients())
    assert any("q_proj" in name for name in found)
    assert not any("experts" in name for name in found)


def test_stacked_experts_take_no_dropout(moe: tuple[trocar.Client, Path]) -> None:
    with pytest.raises(TrainerInvalidError, match="stacked experts take no dropout"):
        moe[0].train("moe", lora=trocar.training.lora({"*.mlp.*": 2}, dropout=0.1), losses="causal_lm")
