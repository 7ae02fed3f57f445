"""Flags: bool, int and str arguments of a forward, as torch takes them; others are refused."""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import trocar
from tests.support.models.text_models import save_tokenizer
from tests.support.models.transformers_folders import family_inputs, save_family, save_image_processor
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.wire.open_inference import arrays_of, infer, request_of
from tests.support.wire.wire import raw_channel
from trocar._cli import main


class Scaled(nn.Module):
    """A model with flags of every type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.linear.weight)
        self.last = nn.Identity()

    def forward(
        self, x: torch.Tensor, times: int = 1, mode: str = "plain", negate: bool = False
    ) -> torch.Tensor:
        value = self.linear(x) * times
        if mode == "wide":
            value = torch.cat([value, value], 1)
        return torch.as_tensor(self.last(-value if negate else value))


FACTORY = f"{__name__}:Scaled"
FLAGS = {
    "x": {"dtype": "float32", "shape": ["batch", 3]},
    "times": {"dtype": "int", "optional": True},
    "mode": {"dtype": "str", "optional": True},
    "negate": {"dtype": "flag:bool", "optional": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("folders")
    found = {name: (root / name, save_family(name, root / name)) for name in ("bert", "vit", "clip")}
    for name in ("vit", "clip"):
        save_image_processor(name, root / name)
    save_tokenizer(root / "clip", model_input_names=["input_ids", "attention_mask"])
    return {name: (folder, model.requires_grad_(False)) for name, (folder, model) in found.items()}


@pytest.fixture(scope="module")
def server(models: dict[str, tuple[Path, Any]]) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, (folder, _) in models.items()}
    tables["scaled"] = {"factory": FACTORY, "input_shape": [3], "inputs": FLAGS}
    tables["undescribed"] = {"factory": FACTORY, "input_shape": [3]}
    with running_server(models=tables, device="cpu") as running:
        yield running


def _tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def test_flags_of_a_forward_are_listed_and_take_effect(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    listed = {entry.name: entry.dtype for entry in client.model("vit").inputs if entry.is_flag}
    assert listed["interpolate_pos_encoding"] == "bool"
    pixels = np.random.default_rng(0).standard_normal((2, 3, 12, 16), np.float32)
    with torch.inference_mode():
        wanted = models["vit"][1](torch.from_numpy(pixels), interpolate_pos_encoding=True).logits
    inputs: dict[str, Any] = {"pixel_values": pixels, "interpolate_pos_encoding": True}
    np.testing.assert_array_equal(client.extract("vit", inputs, ["classifier"])["classifier"], wanted)
    with pytest.raises(trocar.errors.InputRejectedError):
        client.extract("vit", {**inputs, "interpolate_pos_encoding": False}, ["classifier"])


def test_an_output_that_a_flag_asks_for_can_be_tapped(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    inputs = family_inputs("bert")
    with torch.inference_mode():
        wanted = models["bert"][1](**_tensors(inputs), output_hidden_states=True).hidden_states
    tap = '/out["hidden_states"][1]'
    flagged: dict[str, Any] = {**inputs, "output_hidden_states": True}
    np.testing.assert_array_equal(client.extract("bert", flagged, [tap])[tap], wanted[1])
    assert client.plan("bert", flagged, [tap]).feature_maps[tap].shape == (2, 7, 8)
    with pytest.raises(trocar.errors.UnknownPickError):  # without the flag, after it: another plan
        client.extract("bert", inputs, [tap])


def test_each_value_of_a_flag_is_a_plan_of_its_own(client: trocar.Client) -> None:
    x = np.ones((2, 3), np.float32)
    for rows in (1, 2, 5):
        for times in (1, 2, -3):
            inputs: dict[str, Any] = {"times": times, "x": x[:1].repeat(rows, 0)}
            np.testing.assert_array_equal(
                client.extract("scaled", inputs, ["last"])["last"], np.full((rows, 2), 3 * times)
            )
    wide: dict[str, Any] = {"x": x, "mode": trocar.flag("wide"), "negate": True}
    assert client.plan("scaled", wide, ["last"]).feature_maps["last"].shape == (2, 4)
    assert client.plan("scaled", {"x": x}, ["last"]).feature_maps["last"].shape == (2, 2)
    np.testing.assert_array_equal(client.extract("scaled", wide, ["last"])["last"], np.full((2, 4), -3))


def test_streams_gradients_sources_and_asyncio_take_flags(
    server: RunningServer, client: trocar.Client
) -> None:
    x = np.ones((2, 3), np.float32)
    batches: list[Any] = [{"x": x, "times": times} for times in (1, 2)]
    with client.extract_stream("scaled", batches, ["last"]) as stream:
        assert [result.maps["last"][0, 0] for result in stream if result.maps is not None] == [3, 6]
    grads = client.gradients("scaled", {"x": x, "times": 5}, of=trocar.value("last"), at=["linear"])
    np.testing.assert_array_equal(grads["linear/grad_out"], np.full((2, 2), 5))
    swapped = client.extract(
        "scaled",
        {"x": x},
        ["last"],
        edits=[trocar.edit("last", "swap", source="other")],
        sources={"other": {"x": x, "times": 7}},
    )
    np.testing.assert_array_equal(swapped["last"], np.full((2, 2), 21))

    async def awaited() -> Any:
        async with trocar.aio.connect(server.address) as other:
            return (await other.extract("scaled", batches[1], ["last"]))["last"]

    np.testing.assert_array_equal(asyncio.run(awaited()), np.full((2, 2), 6))


def test_a_step_of_a_trainer_takes_flags_as_torch_does(client: trocar.Client) -> None:
    x, wanted = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    trainer = client.train("scaled", losses="mse", optimizer=trocar.training.sgd(lr=0.01))
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for times in (2, 1, 3):
        result = trainer.step({"x": x, "times": times, "negate": True}, wanted)
        loss = torch.nn.functional.mse_loss(
            model(torch.from_numpy(x), times=times, negate=True), torch.from_numpy(wanted)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert result.loss == loss.item()
    weight = trainer.extract({"x": x}, ["linear/param(weight)"])["linear/param(weight)"]
    np.testing.assert_array_equal(weight, model.linear.weight.detach().numpy())
    evaluation = trainer.evaluate({"x": x, "times": 4}, wanted)
    plain = torch.nn.functional.mse_loss(model(torch.from_numpy(x), times=4), torch.from_numpy(wanted))
    assert evaluation.loss == plain.item()
    with pytest.raises(trocar.errors.InputRejectedError, match="'times' takes a int"):
        trainer.step({"x": x, "times": True}, wanted)
    trainer.close()


def test_the_command_line_takes_flags(
    server: RunningServer,
    client: trocar.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = tmp_path / "rows.npy"
    np.save(rows, x)
    flags = ["--flag", "times=3", "--flag", "negate=true", "--flag", 'mode="wide"']
    expected = client.extract(
        "scaled", {"x": x, "times": 3, "negate": True, "mode": trocar.flag("wide")}, ["last"]
    )["last"]

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        captured = capsys.readouterr()
        assert not stopped.value.code, captured.err
        return captured.out

    one = ["extract", "scaled", str(rows), "--tap", "last", *flags]
    run(*one, "--out", str(tmp_path / "one.safetensors"))
    np.testing.assert_array_equal(load_file(tmp_path / "one.safetensors")["last"], expected)
    run(*one, "--out", str(tmp_path / "folder"), "--batch", "3")
    np.testing.assert_array_equal(trocar.read_features(tmp_path / "folder")["last"][:], expected)
    words = ["scaled", str(rows), *flags, "--json"]
    stats = json.loads(run("stats", *words, "--tap", "last", "--stats", "min"))
    assert stats["stats"]["last"]["min"] == expected.min()
    grads = json.loads(run("gradients", *words, "--at", "linear", "--of", "sum:last", "--stats", "absmax"))
    assert grads["stats"]["linear/grad_out"]["absmax"] == 6


def _answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--json"])
    captured = capsys.readouterr()
    assert not stopped.value.code, captured.err
    return json.loads(captured.out)


def test_dry_runs_on_the_command_line_take_flags(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    wide = ["plan", "scaled", "--tap", "last", "--flag", "mode=wide"]
    assert _answer(capsys, *wide)["feature_maps"]["last"]["shape"] == [1, 4]
    assert _answer(capsys, *wide, "--input", "5,3")["feature_maps"]["last"]["shape"] == [5, 4]
    hidden = _answer(
        capsys, "plan", "bert", "--tap", '/out["hidden_states"][1]', "--flag", "output_hidden_states=true"
    )
    assert hidden["feature_maps"]['/out["hidden_states"][1]']["shape"] == [1, 8, 8]
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "scaled", "--tap", "last", "--flag", "times=much"])
    assert stopped.value.code == 1
    assert "'times' takes a int, not 'much' (str)" in " ".join(capsys.readouterr().err.split())


def test_classes_on_the_command_line_are_those_with_the_flags(
    server: RunningServer,
    models: dict[str, tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    pixels = np.random.default_rng(1).standard_normal((3, 3, 12, 16), np.float32)
    path = tmp_path / "large.npy"
    np.save(path, pixels)
    flags = ["--flag", "interpolate_pos_encoding=true"]
    with torch.inference_mode():
        logits = models["vit"][1](torch.from_numpy(pixels), interpolate_pos_encoding=True).logits
    found = _answer(capsys, "predict", "vit", str(path), *flags, "--batch", "2", "--top", "1")
    assert [one["classes"][0]["number"] for one in found["samples"]] == logits.argmax(1).tolist()
    with pytest.raises(SystemExit):
        main(["predict", "vit", str(path)])
    capsys.readouterr()
    grads = _answer(capsys, "gradients", "vit", str(path), "--at", "classifier", "--stats", "absmax", *flags)
    assert grads["of"].startswith(f"logit({logits.argmax(1).tolist()}")


@pytest.mark.parametrize(
    "words",
    [
        ["analyse", "dead", "vit", "FILE", "--tap", "vit.layers.1"],
        ["analyse", "cka", "vit", "FILE", "--tap", "vit.layers.1"],
        ["analyse", "fid", "vit", "FILE", "FILE", "--at", "vit.layers.1"],
        ["compare", "vit", "FILE", "--other", "vit", "--tap", "vit.layers.1"],
        ["compare", "vit", "FILE", "--tap", "vit.layers.1", "--edit", "vit.layers.0 scale 2"],
        ["analyse", "health", "vit", "FILE", "--at", "vit.layers.1"],
    ],
    ids=lambda words: words[0],
)
def test_analyses_on_the_command_line_take_flags(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    np.save(
        tmp_path / "large.npy", np.random.default_rng(1).standard_normal((4, 3, 12, 16)).astype(np.float32)
    )
    given = [str(tmp_path / "large.npy") if word == "FILE" else word for word in words]
    assert _answer(capsys, *given, "--flag", "interpolate_pos_encoding=true")
    with pytest.raises(SystemExit) as stopped:  # the model refuses pictures of this size
        main(given)
    assert stopped.value.code
    capsys.readouterr()


@pytest.mark.parametrize("words", [["times"], ["=3"], ["times=1", "times=2"]])
def test_a_flag_that_cannot_be_read_ends_the_command(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    rows = tmp_path / "rows.npy"
    np.save(rows, np.ones((1, 3), np.float32))
    flags = [part for word in words for part in ("--flag", word)]
    with pytest.raises(SystemExit) as stopped:
        main(["stats", "scaled", str(rows), "--tap", "last", *flags])
    assert stopped.value.code == 2
    assert "--flag:" in capsys.readouterr().err


def test_requests_of_open_inference_take_flags_as_parameters(server: RunningServer) -> None:
    request = request_of("scaled", {"x": np.ones((2, 3), np.float32)}, ["last"])
    request.parameters["times"].int64_param = 5
    request.parameters["negate"].bool_param = True
    request.parameters["traceparent"].string_param = "00-1"
    with raw_channel(server.address) as channel:
        np.testing.assert_array_equal(arrays_of(infer(channel, request))["last"], np.full((2, 2), -15))
        request.parameters["times"].bool_param = True
        with pytest.raises(grpc.RpcError, match="'times' takes a int"):
            infer(channel, request)


def test_texts_images_and_flags_go_together(client: trocar.Client) -> None:
    pictures = [np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)]
    inputs: dict[str, Any] = {
        "text": ["a cat"],
        "images": pictures,
        "output_hidden_states": True,
        "return_loss": True,
    }
    maps = client.extract("clip", inputs, ['/out["loss"]', '/out["text_model_output"]["hidden_states"][0]'])
    assert maps['/out["loss"]'].shape == ()
    assert maps['/out["text_model_output"]["hidden_states"][0]'].shape == (1, 4, 8)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("scaled", {"times": True}, r"'times' takes a int, not True \(bool\)"),
        ("scaled", {"negate": 1}, r"'negate' takes a bool, not 1 \(int\)"),
        ("scaled", {"mode": 2}, r"'mode' takes a str, not 2"),
        ("scaled", {"training": True}, "'training' is given as bool and is not a flag.*times: int"),
        ("scaled", {"x": 3}, r"'x' is given as int and is not a flag.*x: float32 \(batch, 3\)"),
        ("bert", {"use_cache": True}, "'use_cache' is given as bool and is not a flag"),
        ("bert", {"return_dict": False}, "'return_dict' is given as bool and is not a flag"),
        ("undescribed", {"times": 2}, "'times' is given as int and is not a flag of the model; it has none"),
    ],
)
def test_what_is_no_flag_is_refused_by_name(
    client: trocar.Client, model: str, flags: dict[str, Any], message: str
) -> None:
    inputs = family_inputs("bert") if model == "bert" else {"x": np.ones((2, 3), np.float32)}
    with pytest.raises(trocar.errors.InputRejectedError, match=message):
        client.extract(model, {**inputs, **flags}, ["**"])


def test_the_client_refuses_flags_that_cannot_be_sent(client: trocar.Client) -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="64 bits"):
        client.extract("scaled", {"x": x, "times": 2**63}, ["last"])
    with pytest.raises(TypeError, match="int cannot be an input"):
        client.extract("scaled", 3, ["last"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not float"):
        trocar.flag(0.5)  # type: ignore[arg-type]
