"""`trocar gradients`, `health` and `edits`, as they are typed, with a client that needs no server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

import trocar
from tests.unit.client._cli.surgery_client import GRADIENT, SurgeryClient
from trocar._cli.app import build_app


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> SurgeryClient:
    made = SurgeryClient()
    monkeypatch.setattr(trocar, "connect", lambda *_, **__: made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.ones((2, 2), np.float32))
    return tmp_path / "x.npy"


def trocar_(*words: object) -> Result:
    return CliRunner().invoke(build_app(), [str(word) for word in words])


def options(client: SurgeryClient, name: str) -> dict[str, Any]:
    """Return the arguments of the one call of this name."""
    (found,) = [arguments for called, arguments in client.calls if called == name]
    return found


def test_gradients_prints_statistics_and_sends_no_values(client: SurgeryClient, path: Path) -> None:
    done = trocar_("gradients", "m", path, "--at", "conv", "--at", "fc", "--of", "logit:1")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["feature", "map", "shape", "l2", "absmax", "zero_fraction"]
    assert lines[2] == ["conv/grad_out", "(2,", "2)", "5", "4", "0.5"]
    assert done.stdout.splitlines()[-1] == "of logit(1) = 1.25"
    sent = options(client, "gradients")
    assert sent["of"] == trocar.logit(1)
    assert [(tap.selector, tap.values, tap.names) for tap in sent["at"]] == [
        ("conv", False, ("l2", "absmax", "zero_fraction")),
        ("fc", False, ("l2", "absmax", "zero_fraction")),
    ]
    np.testing.assert_array_equal(sent["inputs"], np.ones((2, 2)))


def test_gradients_are_saved(client: SurgeryClient, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "grads.safetensors"
    done = trocar_("gradients", "m", path, "--at", "conv", "--of", "sum:conv", "--out", out, "--stats", "")
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.stdout
    np.testing.assert_array_equal(load_file(out)["conv/grad_out"], GRADIENT)
    assert list(tmp_path.glob("*.part")) == []


def test_gradients_as_json(client: SurgeryClient, path: Path) -> None:
    done = trocar_(
        "gradients", "m", path, "--at", "conv", "--of", "logit:goldfish", "--stats", "l2", "--json"
    )
    found = json.loads(done.stdout)
    assert (found["of"], found["objective"], found["out"]) == ("logit(1) (goldfish)", 1.25, None)
    assert found["stats"] == {"conv/grad_out": {"l2": 5.0}}
    assert found["shapes"] == {"conv/grad_out": [2, 2]}


def test_gradients_take_the_predicted_class_of_the_model_as_it_is(client: SurgeryClient, path: Path) -> None:
    trocar_("gradients", "m", path, "--at", "conv", "--edit", "conv zero", "--edit", "ablate-3")
    sent = options(client, "gradients")
    assert sent["of"] == trocar.logit(1)
    assert sent["edits"] == [trocar.edit("conv", "zero"), "ablate-3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--at", "conv", "--stats", ""), "--stats: name at least one"),
        (("--at", "conv", "--stats", "l3"), "not 'l3'"),
        (("--at", "conv", "--out", "x.npz"), "must end in .safetensors"),
        (("--at", "conv", "--out", "no/x.safetensors"), "no folder no"),
        (("--at", "conv", "--edit", "conv zeero"), "did you mean zero"),
        (("--at", "conv", "--of", "prob:x"), "no class 'x'"),
        (("--of", "logit:1"), "--at"),
    ],
)
def test_a_wrong_command_line_computes_nothing(
    client: SurgeryClient, path: Path, words: tuple[str, ...], message: str
) -> None:
    done = trocar_("gradients", "m", path, *words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "gradients" not in [name for name, _ in client.calls]


def test_images_and_arrays_are_not_one_pass(client: SurgeryClient, path: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jpg").touch()
    done = trocar_("analyse", "health", "m", path, tmp_path / "x.jpg")
    assert done.exit_code == 2
    assert "run them separately" in " ".join(done.stderr.split())


def test_health_prints_the_report_with_the_thresholds_of_the_call(client: SurgeryClient, path: Path) -> None:
    words = ("--vanishing", "1e-4", "--exploding", "50", "--vanishing-ratio", "0", "--exploding-ratio", "9")
    loss = ("--of", "loss:cross_entropy", "--labels", "goldfish,0")
    done = trocar_("analyse", "health", "m", path, *loss, *words, "--edit", "conv scale 2", "--at", "conv")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[2].split() == ["relu", "M", "0", "100.0%", "dead"]
    assert done.stdout.splitlines()[-1].startswith("of loss('cross_entropy'")
    sent = options(client, "health")
    assert sent.pop("inputs") is not None
    assert sent == {
        "of": trocar.loss("cross_entropy", [1, 0]),
        "at": ["conv"],
        "edits": [trocar.edit("conv", "scale", 2)],
        "vanishing": 1e-4,
        "exploding": 50.0,
        "vanishing_ratio": 0.0,
        "exploding_ratio": 9.0,
    }


def test_health_looks_everywhere_by_default(client: SurgeryClient, path: Path) -> None:
    trocar_("analyse", "health", "m", path)
    assert options(client, "health")["at"] == "**"


def test_health_as_json_and_as_a_picture(client: SurgeryClient, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = trocar_("analyse", "health", "m", path, "--json", "--plot", tmp_path / "health.png")
    found = json.loads(done.stdout)
    assert [(row["name"], row["flags"]) for row in found["rows"]] == [("conv", []), ("relu", ["dead"])]
    assert found["of"] == "logit(1) (goldfish)"
    assert (tmp_path / "health.png").read_bytes().startswith(b"\x89PNG")


def test_thresholds_the_wrong_way_round_are_a_usage_error(client: SurgeryClient, path: Path) -> None:
    done = trocar_("analyse", "health", "m", path, "--vanishing", "2", "--exploding", "1")
    assert done.exit_code == 2
    assert "--vanishing=2.0 must be below exploding=1.0" in " ".join(done.stderr.split())
    assert client.calls == []


def test_edits_are_added(client: SurgeryClient) -> None:
    done = trocar_(
        "edits", "add", "ablate-3", "m", "--edit", "layer3 zero", "--edit", "fc scale 2", "--replace"
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("ablate-3  m, stored 2026-01-02 00:00:00 UTC, 16 bytes of arrays\n")
    assert options(client, "store_edits") == {
        "model_id": "m",
        "name": "ablate-3",
        "edits": [trocar.edit("layer3", "zero"), trocar.edit("fc", "scale", 2)],
        "replace": True,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x", "m"), "at least one --edit"),
        (("x", "m", "--edit", "ablate-3"), "cannot refer to other stored edits"),
        (("X y", "m", "--edit", "a zero"), "cannot be the name of stored edits"),
    ],
)
def test_edits_that_cannot_be_stored_are_a_usage_error(
    client: SurgeryClient, words: tuple[str, ...], message: str
) -> None:
    done = trocar_("edits", "add", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert client.calls == []


def test_edits_are_listed(client: SurgeryClient) -> None:
    assert "edit('layer3', 'zero')" in trocar_("edits", "list").stdout
    found = json.loads(trocar_("edits", "list", "m", "--json").stdout)
    assert (found[0]["name"], found[0]["stored_at"]) == ("ablate-3", "2026-01-02T00:00:00+00:00")
    assert [arguments["model_id"] for _, arguments in client.calls] == [None, "m"]
    client.stored = []
    assert "no stored edits;" in trocar_("edits", "list").stdout
    assert "no stored edits for m;" in trocar_("edits", "list", "m").stdout


def test_edits_are_removed(client: SurgeryClient) -> None:
    assert trocar_("edits", "remove", "ablate-3", "m").stdout == "removed ablate-3 of m\n"
    assert options(client, "delete_edits") == {"model_id": "m", "name": "ablate-3"}


def test_plan_takes_edits_and_says_what_they_change(client: SurgeryClient) -> None:
    done = trocar_("plan", "m", "--tap", "conv", "--edit", "conv zero")
    assert done.exit_code == 0, done.output
    assert "edits conv*: conv1, conv2" in done.stdout.splitlines()
    assert options(client, "plan") == {"edits": [trocar.edit("conv", "zero")], "adapter": ""}
