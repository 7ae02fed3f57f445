"""Edits and gradients on the command line against a real server: arguments in, text and files out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from trocar._base.tensors import Array
from trocar._cli import main
from trocar_server.config import ModelConfig

PLAIN = ModelConfig(
    factory="tests.support.models.tiny_models:Plain",
    weights="random:0",
    input_shape=(3, 8, 8),
    categories=("cat", "cup", "dog", "car", "cow"),
)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Trocar = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with capture_logs(), running_server(models={"plain": PLAIN}) as running:  # its log would be in our stdout
        yield running


@pytest.fixture
def cli(server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trocar:
    """Run `trocar` with these words, connected to the server."""
    monkeypatch.setenv("TROCAR_SERVER", server.address)

    def run(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def inputs() -> Array:
    return np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def path(inputs: Array, tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", inputs)
    return tmp_path / "x.npy"


def rebuilt() -> torch.nn.Module:
    torch.manual_seed(0)
    return Plain().eval()


def test_gradients_of_the_predicted_class_are_those_of_torch(
    cli: Trocar, path: Path, inputs: Array, tmp_path: Path
) -> None:
    out = tmp_path / "grads.safetensors"
    done = cli("gradients", "plain", path, "--at", "/in", "--at", "fc/param(weight)", "--out", out)
    assert done.code == 0, done.err
    model, x = rebuilt(), torch.tensor(inputs, requires_grad=True)
    objective = model(x).max(dim=1).values.sum()
    objective.backward()
    assert x.grad is not None
    found = load_file(out)
    np.testing.assert_allclose(found["/grad_in"], x.grad.numpy(), rtol=1e-5, atol=1e-8)
    weight = model.get_parameter("fc.weight").grad
    assert weight is not None
    np.testing.assert_allclose(found["fc/param_grad(weight)"], weight.numpy(), rtol=1e-5, atol=1e-7)
    assert f"= {objective.item():.3g}" in done.out  # the first digits of more


def test_gradients_of_a_loss_with_names_of_classes(cli: Trocar, path: Path, inputs: Array) -> None:
    words = ("--of", "loss:cross_entropy", "--labels", "cup,cat,4,dog,0,0", "--at", "/in", "--stats", "l2")
    found = cli("gradients", "plain", path, *words, "--json").json
    x = torch.tensor(inputs, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(rebuilt()(x), torch.tensor([1, 0, 4, 2, 0, 0]))
    loss.backward()
    assert x.grad is not None
    assert found["objective"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["stats"]["/grad_in"]["l2"] == pytest.approx(x.grad.double().norm().item(), rel=1e-5)


def test_a_class_that_is_not_there_ends_with_its_reason(cli: Trocar, path: Path) -> None:
    done = cli("gradients", "plain", path, "--at", "conv", "--of", "logit:99")
    assert done.code == 1
    assert "[OBJECTIVE_OUT_OF_RANGE]" in done.err


def test_health_is_the_clients_report(cli: Trocar, client: trocar.Client, path: Path, inputs: Array) -> None:
    done = cli("analyse", "health", "plain", path, "--of", "sum:fc", "--exploding", "1e-3", "--json")
    expected = client.health("plain", inputs, trocar.value("fc"), exploding=1e-3)
    assert [(row["name"], row["flags"]) for row in done.json["rows"]] == [
        (row.name, list(row.flags)) for row in expected.rows
    ]
    assert expected.flagged
    shown = cli("analyse", "health", "plain", path, "--of", "sum:fc", "--exploding", "1e-3")
    assert shown.out.startswith(str(expected))


def test_extract_and_stats_and_plan_take_edits(
    cli: Trocar, client: trocar.Client, path: Path, inputs: Array, tmp_path: Path
) -> None:
    edit = ("--edit", "conv scale 0.0 channels=1,2")
    out = tmp_path / "features.safetensors"
    assert cli("extract", "plain", path, "--tap", "conv", "--tap", "fc", "--out", out, *edit).code == 0
    expected = client.extract(
        "plain", inputs, ["conv", "fc"], edits=[trocar.edit("conv", "scale", 0.0, channels=[1, 2])]
    )
    found = load_file(out)
    for name in ("conv", "fc"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert not found["conv"][:, 1:3].any()
    stats = cli(
        "stats", "plain", path, "--tap", "conv", "--over", "channel", "--stats", "absmax", *edit, "--json"
    )
    assert [value == 0 for value in stats.json["stats"]["conv"]["absmax"]] == [False, True, True, False]
    assert cli("plan", "plain", "--tap", "fc", *edit).code == 0
    done = cli("plan", "plain", "--tap", "fc", "--edit", "conv scale 0 channels=9")
    assert (done.code, "[EDIT" in done.err) == (1, True)


def test_a_folder_has_the_edited_rows_and_refuses_others(
    cli: Trocar, client: trocar.Client, path: Path, inputs: Array, tmp_path: Path
) -> None:
    run = ("extract", "plain", path, "--tap", "fc", "--out", tmp_path / "out", "--batch", "3")
    assert cli(*run, "--edit", "conv zero").code == 0
    expected = client.extract("plain", inputs[:3], ["fc"], edits=trocar.edit("conv", "zero"))
    features = trocar.read_features(tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(features["fc"])[:3], expected["fc"])
    assert "is complete already" in cli(*run, "--edit", "conv zero").out
    refused = cli(*run)
    assert refused.code == 1
    assert "edits: was" in refused.err


def test_stored_edits_are_used_by_name(
    cli: Trocar, client: trocar.Client, path: Path, tmp_path: Path
) -> None:
    add = ("edits", "add", "ablate-3", "plain", "--edit", "conv zero channels=1")
    assert cli(*add).code == 0
    again = cli(*add)
    assert (again.code, "[EDITS_EXIST]" in again.err) == (1, True)
    assert cli(*add, "--edit", "fc scale 2", "--replace").code == 0
    assert "edit('fc', 'scale', 2.0)" in cli("edits", "list", "plain").out
    named = cli("stats", "plain", path, "--tap", "fc", "--stats", "l2", "--edit", "ablate-3", "--json")
    written = cli(
        *("stats", "plain", path, "--tap", "fc", "--stats", "l2", "--json"),
        *("--edit", "conv zero channels=1", "--edit", "fc scale 2"),
    )
    assert named.json["stats"] == written.json["stats"]
    run = ("extract", "plain", path, "--tap", "fc", "--out", tmp_path / "out", "--edit", "ablate-3")
    assert cli(*run).code == 0
    assert cli(*add, "--replace").code == 0
    assert "edits: was" in cli(*run).err
    assert cli("edits", "remove", "ablate-3", "plain").code == 0
    assert "[UNKNOWN_EDITS]" in cli("edits", "remove", "ablate-3", "plain").err
    assert "no edits are stored under 'ablate-3'" in cli(*run).err


@pytest.mark.parametrize("rows", [1, 2])
def test_a_swap_takes_values_of_another_input(
    cli: Trocar, client: trocar.Client, inputs: Array, tmp_path: Path, rows: int
) -> None:
    np.save(tmp_path / "x.npy", inputs[:rows])
    for row in range(rows):
        np.save(tmp_path / f"{row}.npy", inputs[3 + row])
    sources = [word for row in range(rows) for word in ("--edit-source", f"other={tmp_path / str(row)}.npy")]
    words = ("--tap", "conv", "--edit", "conv swap source=other", *sources)
    done = cli("extract", "plain", tmp_path / "x.npy", *words, "--out", tmp_path / "out.safetensors")
    assert done.code == 0, done.err
    with torch.no_grad():
        expected = rebuilt().get_submodule("conv")(torch.from_numpy(inputs[3 : 3 + rows]))
    found = load_file(tmp_path / "out.safetensors")["conv"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_limit_of_one_batch_counts_samples(
    cli: Trocar, client: trocar.Client, inputs: Array, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", inputs[:3])
    np.save(tmp_path / "y.npy", inputs[3:5])
    words = ("--tap", "conv", "--edit", "conv swap source=y", "--edit-source", f"y={tmp_path / 'y.npy'}")
    out = tmp_path / "out.safetensors"
    done = cli("extract", "plain", tmp_path / "x.npy", *words, "--limit", 2, "--out", out)
    assert done.code == 0, done.err
    assert len(load_file(out)["conv"]) == 2


@pytest.mark.parametrize(
    "option",
    [
        ("--format", "zarr"),
        ("--decode", "client"),
        ("--on-error", "skip"),
        ("--restart",),
        ("--column", "x"),
        ("--truncate",),
        ("--max-tokens", 3),
    ],
)
def test_one_batch_refuses_options_that_only_folders_have(
    cli: Trocar, path: Path, tmp_path: Path, option: tuple[object, ...]
) -> None:
    words = ("--tap", "conv", "--edit", "conv swap source=y", "--edit-source", f"y={path}")
    done = cli("extract", "plain", path, *words, *option, "--out", tmp_path / "out.safetensors")
    assert done.code == 2
    assert "need a folder" in " ".join(done.err.split())


def test_gradients_of_squares_with_a_value_and_another_input(
    cli: Trocar, inputs: Array, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", inputs[:1])
    np.save(tmp_path / "y.npy", inputs[1:2])
    words = ("--of", "squares:conv", "--at", "conv", "--tap", "conv", "--edit", "conv swap source=y")
    source = ("--edit-source", f"y={tmp_path / 'y.npy'}")
    out = tmp_path / "out.safetensors"
    done = cli("gradients", "plain", tmp_path / "x.npy", *words, *source, "--out", out)
    assert done.code == 0, done.err
    with torch.no_grad():
        value = rebuilt().get_submodule("conv")(torch.from_numpy(inputs[1:2])).numpy()
    found = load_file(out)
    np.testing.assert_allclose(found["conv"], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["conv/grad_out"], 2 * value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--edit-source", "y"), "is not NAME=FILE"),
        (("--edit-source-text", "=a"), "is not NAME=TEXT"),
        (("--edit-source", "y={x}", "--edit-source-text", "y=a"), "has files and texts"),
        (("--edit-source", "y=nothing.jpg"), "nothing.jpg: no such file"),
    ],
)
def test_a_mistake_in_another_input_is_told(
    cli: Trocar, path: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    given = [word.replace("{x}", str(path)) for word in words]
    done = cli("extract", "plain", path, "--tap", "conv", "--out", tmp_path / "o.safetensors", *given)
    assert done.code == 2
    assert said in " ".join(done.err.split())
