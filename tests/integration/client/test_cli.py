"""The command line against a real server, in this process: arguments in, text and exit code out."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from structlog.testing import capture_logs

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from trocar._base.tensors import Array
from trocar._cli import main
from trocar._cli.options import completion
from trocar_server.config import ModelConfig, PreprocessingConfig

PREPROCESSING = PreprocessingConfig(resize=(), crop=(), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
PLAIN = ModelConfig(
    factory="tests.support.models.tiny_models:Plain",
    weights="random:0",
    input_shape=(3, 8, 8),
    preprocessing=PREPROCESSING,
    categories=("cat", "cup", "dog", "car", "cow"),
)
HALF = ModelConfig(factory="tests.support.models.tiny_models:Half", weights="random:0", input_shape=(7,))


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_err(self) -> Any:
        return json.loads(self.err)["error"]


Trocar = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"plain": PLAIN, "half": HALF, "spare": HALF}
    with capture_logs(), running_server(models=models) as running:  # its log would be in our stdout
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
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five small images, none like another."""
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    paths = [folder / f"{index}.png" for index in range(5)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    return paths


def test_models_lists_what_is_hosted(cli: Trocar) -> None:
    done = cli("models")
    assert done.code == 0
    assert [line.split()[:2] for line in done.out.splitlines()[2:]] == [
        ["half", "loaded"],
        ["plain", "loaded"],
        ["spare", "loaded"],
    ]


def test_one_model_is_shown_in_full(cli: Trocar) -> None:
    out = cli("models", "plain").out
    assert "(batch, 3, 8, 8)" in out
    assert "cat, cup, dog, car, cow" in out
    assert "tests.support.models.tiny_models:Plain" in out


def test_models_as_json_are_the_clients_answer(cli: Trocar, client: trocar.Client) -> None:
    assert [model["model_id"] for model in cli("models", "--json").json] == ["half", "plain", "spare"]
    assert cli("models", "plain", "--json").json["categories"] == list(client.model("plain").categories)


def test_models_are_unloaded_and_loaded(cli: Trocar) -> None:
    assert cli("admin", "unload", "spare").out == "spare is unloaded\n"
    assert cli("admin", "load", "spare").out.startswith("spare is loaded on cpu: random:0, 7 parameters")
    assert cli("admin", "load", "spare", "--weights", "random:1").code == 1


def test_arrays_for_a_model_that_is_not_loaded_say_what_to_do(cli: Trocar, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 7), np.float32))
    cli("admin", "unload", "spare")
    done = cli("stats", "spare", tmp_path / "x.npy", "--tap", "/out")
    cli("admin", "load", "spare")
    assert done.code == 1
    assert "trocar admin load spare [MODEL_NOT_LOADED]" in done.err


def test_modules_are_a_tree_in_execution_order(cli: Trocar) -> None:
    rows = [line.split()[1] for line in cli("modules", "plain").out.splitlines()[3:]]
    assert rows == ["conv", "relu", "conv2", "pool", "fc", "unused"]


def test_modules_take_the_input_to_assume(cli: Trocar) -> None:
    assert "(9, 4, 16, 16)" in cli("modules", "plain", "--input", "9,3,16,16").out
    done = cli("modules", "plain", "--input", "9x3")
    assert done.code == 2
    assert "1,3,224,224" in done.err


def test_modules_below_a_depth_are_left_out(cli: Trocar) -> None:
    lines = cli("modules", "plain", "--depth", "0").out.splitlines()
    assert lines[-1] == "6 deeper modules are not shown"
    assert len(lines) == 4


def test_modules_as_json_have_calls_and_shapes(cli: Trocar) -> None:
    found = {module["path"]: module for module in cli("modules", "plain", "--json").json["modules"]}
    assert len(found["relu"]["calls"]) == 2
    assert found["conv"]["calls"][0][0]["shape"] == [1, 4, 8, 8]


def test_extract_joins_batches_in_the_order_of_the_images(
    cli: Trocar, client: trocar.Client, photos: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "features.safetensors"
    order = [photos[index] for index in (3, 0, 4, 1, 2)]
    done = cli("extract", "plain", *order, "--tap", "conv", "--tap", "relu@1", "--out", out, "--batch", 2)
    assert done.code == 0
    found = load_file(out)
    assert list(found) == ["conv", "relu@1"]
    for index, photo in enumerate(order):
        alone = client.extract("plain", photo, ["conv", "relu@1"])
        for name in found:
            np.testing.assert_allclose(found[name][index : index + 1], alone[name], rtol=1e-5, atol=1e-6)


def test_extract_equals_hooks_in_process(
    cli: Trocar, server: RunningServer, photos: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "features.safetensors"
    assert cli("extract", "plain", *photos, "--tap", "conv2", "--out", out).code == 0
    pixels = np.stack([np.asarray(Image.open(photo)) for photo in photos])
    inputs = (torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() / 255 - 0.5) / 0.5
    expected = server.on_owner(lambda: _hooked(server, inputs))
    torch.testing.assert_close(load_torch(out)["conv2"], expected, rtol=1e-5, atol=1e-6)


def _hooked(server: RunningServer, inputs: torch.Tensor) -> torch.Tensor:
    """What a plain torch hook sees, copied at once."""
    module = server.engine.catalogue.loaded("plain").module
    seen: list[torch.Tensor] = []
    handle = module.get_submodule("conv2").register_forward_hook(lambda *call: seen.append(call[2].clone()))
    with torch.inference_mode():
        module(inputs)
    handle.remove()
    return torch.tensor(seen[0].tolist())


def test_extract_names_the_images_in_the_metadata(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "features.safetensors"
    cli("extract", "plain", *photos, "--tap", "fc", "--out", out, "--batch", 2)
    with safe_open(out, "numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["trocar.images"]) == [str(photo) for photo in photos]
    assert json.loads(metadata["trocar.info"])["fc"]["shape"] == [5, 5]
    assert metadata["trocar.model_id"] == "plain"


def test_extract_reports_shapes_and_statistics_as_json(
    cli: Trocar, photos: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "features.safetensors"
    words = ("extract", "plain", *photos, "--tap", "conv", "--out", out, "--batch", 2, "--stats", "mean,std")
    report = cli(*words, "--json").json
    assert (report["out"], report["image_count"]) == (str(out), 5)
    assert report["shapes"] == {"conv": [5, 4, 8, 8]}
    values = load_file(out)["conv"].astype(np.float64)
    assert report["stats"]["conv"] == pytest.approx({"mean": values.mean(), "std": values.std()})


def test_extract_says_where_the_time_went(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    words = ("extract", "plain", *photos, "--tap", "conv", "--batch", 2, "--timing")
    spent = cli(*words, "--out", tmp_path / "a.safetensors", "--json").json["timing"]
    assert spent["batch_count"] == 3
    assert 0 < spent["compute_s"] < spent["total_s"]
    parts = spent["queue_s"] + spent["compute_s"] + spent["transfer_s"]
    assert parts == pytest.approx(max(spent["total_s"], spent["queue_s"] + spent["compute_s"]))
    shown = cli(*words, "--out", tmp_path / "b.safetensors").out
    assert re.search(r"3 batches in .* s: queue .* s, compute .* s, transfer .* s", shown)
    assert "timing" not in cli(*words[:-1], "--out", tmp_path / "c.safetensors", "--json").json
    refused = cli(*words, "--out", tmp_path / "folder")
    assert refused.code == 2
    assert "--timing" in refused.err


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_statistics_do_not_depend_on_the_batch(
    cli: Trocar, client: trocar.Client, photos: list[Path], batch: int
) -> None:
    found = cli("stats", "plain", *photos, "--tap", "conv", "--batch", batch, "--json").json
    values = client.extract("plain", list(photos), "conv")["conv"].astype(np.float64)
    assert found["stats"]["conv"] == pytest.approx(
        {
            "mean": values.mean(),
            "std": values.std(),
            "min": values.min(),
            "max": values.max(),
            "zero_fraction": (values == 0).mean(),
        },
        rel=1e-5,
    )


def test_statistics_per_channel_and_per_image(cli: Trocar, client: trocar.Client, photos: list[Path]) -> None:
    words = ("stats", "plain", *photos, "--tap", "conv", "--stats", "var,absmax", "--batch", 2)
    values = client.extract("plain", list(photos), "conv")["conv"].astype(np.float64)
    channel = cli(*words, "--over", "channel", "--json").json["stats"]["conv"]
    sample = cli(*words, "--over", "sample", "--json").json["stats"]["conv"]
    np.testing.assert_allclose(channel["var"], values.var((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(sample["absmax"], np.abs(values).max((1, 2, 3)), rtol=1e-5)


def test_statistics_tables_name_channels_and_images(cli: Trocar, photos: list[Path]) -> None:
    overall = cli("stats", "plain", *photos, "--tap", "*:Conv2d", "--stats", "mean").out.splitlines()
    assert [line.split()[0] for line in overall[2:]] == ["conv", "conv2"]
    per_image = cli("stats", "plain", *photos, "--tap", "fc", "--over", "sample").out
    assert all(str(photo) in per_image for photo in photos)
    per_channel = cli("stats", "plain", *photos, "--tap", "conv", "--over", "channel").out.splitlines()
    assert per_channel[0] == "conv (5, 4, 8, 8)"
    assert [line.split()[0] for line in per_channel[3:]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("count", [1, 5])  # of five images, as many as the parameter has rows
def test_rows_of_a_parameter_have_no_names_of_images(
    cli: Trocar, client: trocar.Client, photos: list[Path], count: int
) -> None:
    words = ("stats", "plain", *photos[:count], "--tap", "fc/param(weight)", "--stats", "mean", "--batch", 2)
    done = cli(*words, "--over", "sample")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    weight = client.extract("plain", list(photos), "fc/param(weight)")["fc/param(weight)"]
    assert lines[0] == f"fc/param(weight) {weight.shape}"
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2", "3", "4"]
    means = [float(line.split()[1]) for line in lines[3:]]
    np.testing.assert_allclose(means, weight.astype(np.float64).mean(1), rtol=1e-3)


def test_arrays_go_to_the_model_as_they_are(cli: Trocar, client: trocar.Client, tmp_path: Path) -> None:
    inputs = np.random.default_rng(1).standard_normal((5, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "inputs.npy", inputs)
    out = tmp_path / "features.safetensors"
    cli("extract", "plain", tmp_path / "inputs.npy", "--tap", "fc", "--out", out)
    np.testing.assert_array_equal(load_file(out)["fc"], client.extract("plain", inputs, "fc")["fc"])


def test_images_of_different_sizes_are_a_clear_error(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    Image.new("RGB", (12, 8)).save(tmp_path / "wide.png")
    words = ("extract", "plain", photos[0], tmp_path / "wide.png", "--tap", "conv", "--batch", 1)
    done = cli(*words, "--out", tmp_path / "f.safetensors")
    assert done.code == 1
    assert "wide.png: 'conv' has rows of shape (4, 8, 12)" in done.err
    assert "one run for each size" in done.err
    assert not list(tmp_path.glob("f.safetensors*"))


def test_feature_maps_without_a_batch_dimension_are_not_joined(cli: Trocar, tmp_path: Path) -> None:
    inputs: Array = np.ones((4, 7), np.float32)
    np.save(tmp_path / "x.npy", inputs)
    words = ("extract", "half", tmp_path / "x.npy", "--tap", "/out", "--out", tmp_path / "f.safetensors")
    assert cli(*words).code == 0
    done = cli(*words, "--batch", 3)
    assert done.code == 1
    assert "its first dimension is not the batch of 3" in done.err


def test_error_of_a_call_names_its_reason(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    done = cli("extract", "plain", *photos, "--tap", "con", "--out", tmp_path / "f.safetensors")
    assert done.code == 1
    assert done.out == ""
    assert "no module 'con'" in done.err
    assert "[UNKNOWN_MODULE]" in done.err
    assert "Traceback" not in done.err


def test_error_of_a_batch_names_its_files(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    done = cli("extract", "plain", *photos, bad, "--tap", "conv", "--out", tmp_path / "f.safetensors")
    assert done.code == 1
    assert "[INVALID_IMAGE]" in done.err
    assert f"while extracting {photos[0]} to {bad}; image 5 is {bad}" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["stats", "extract --out f.safetensors", "analyse dead", "analyse cka"])
def test_array_without_rows_is_a_usage_error(cli: Trocar, tmp_path: Path, command: str) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3, 8, 8), np.float32))
    name, dashes, options = command.partition(" --")
    given = ("plain", tmp_path / "none.npy", "--tap", "conv")
    done = cli(*name.split(), *given, *f"{dashes.strip()}{options}".split())
    assert (done.code, done.out) == (2, "")
    assert "none.npy: no samples" in done.err


def test_stats_take_folders(cli: Trocar, photos: list[Path]) -> None:
    of_files = cli("stats", "plain", *photos, "--tap", "conv", "--json").json
    assert cli("stats", "plain", photos[0].parent, "--tap", "conv", "--json").json == of_files


def test_patterns_that_the_shell_left_are_expanded(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    pattern, words = photos[0].parent / "[0-3].png", ("--tap", "conv", "--json")
    assert cli("stats", "plain", pattern, *words).json == cli("stats", "plain", *photos[:4], *words).json
    one, many = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert cli("extract", "plain", pattern, *words, "--out", one).json["image_count"] == 4
    cli("extract", "plain", *photos[:4], *words, "--out", many)
    assert one.read_bytes() == many.read_bytes()
    assert cli("extract", "plain", pattern, *words, "--out", tmp_path / "c").json["sample_count"] == 4
    done = cli("stats", "plain", photos[0].parent / "*.gif", "--tap", "conv")
    assert done.code == 2
    assert "no file or folder matches the pattern" in " ".join(done.err.split())


@pytest.mark.parametrize(
    "words", [("stats",), ("extract", "--out", "f.safetensors"), ("extract", "--out", "f")]
)
def test_a_url_is_refused_with_the_line_that_mends_it(cli: Trocar, words: tuple[str, ...]) -> None:
    url = "https://example.org/cat.jpg"
    done = cli(words[0], "plain", url, "--tap", "conv", *words[1:], "--json")
    assert (done.code, done.out) == (2, "")
    assert f"download it first: curl -LO {url}" in done.json_err["message"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("modules ", ["half", "plain", "spare"]),
        ("stats pl", ["plain"]),
        ("admin unload h", ["half"]),
        ("extract plain x.png --tap con", ["conv", "conv2"]),
        ("cam plain x.png --at re", ["relu"]),
        ("stats --tap con", []),
        ("models --server 127.0.0.1:1 pl", []),
        ("models --server 127.0.0.1:port pl", []),
    ],
)
def test_models_and_modules_are_completed(
    cli: Trocar, monkeypatch: pytest.MonkeyPatch, typed: str, expected: list[str]
) -> None:
    monkeypatch.setenv("_TROCAR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"trocar {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" "))))
    if expected:
        monkeypatch.setattr(completion, "TIMEOUT_S", 60.0)  # for a machine that is busy
    done = cli()
    assert (done.out.split(), done.err) == (expected, "")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_fit_the_terminal(
    cli: Trocar, photos: list[Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (
        ("modules", "plain"),
        ("models",),
        ("plan", "plain", "--tap", "**"),
        ("analyse", "dead", "plain", photos[0], "--threshold", 1e9),
        ("analyse", "health", "plain", photos[0]),
        ("stats", "plain", photos[0], "--tap", "**"),
    ):
        done = cli(*words)
        assert done.code == 0
        assert {"conv2", "plain"} & set(re.findall(r"\w+", done.out))
        remarks = re.compile(r"of logit|.* (flagged|are dead) ")  # lines of prose, which terminals wrap
        lines = [line for line in done.out.splitlines() if not remarks.match(line)]
        assert [line for line in lines if len(line) > columns] == []


def test_unknown_model_names_the_nearest(cli: Trocar) -> None:
    done = cli("modules", "plane", "--json")
    assert (done.code, done.out) == (1, "")
    assert "plain" in done.json_err["message"]
    assert done.json_err["reason"] == "UNKNOWN_MODEL"


@pytest.mark.parametrize(
    "words",
    [
        ("modles",),
        ("extract", "plain", "nothing.png", "--tap", "conv", "--out", "f.safetensors"),
        ("extract", "plain", "{photo}", "--tap", "conv", "--out", "f.pt"),
        ("extract", "plain", "{photo}", "--out", "f.safetensors"),
        ("stats", "plain", "{photo}", "--tap", "conv", "--stats", "meen"),
        ("stats", "plain", "{photo}", "--tap", "conv", "--stats", ""),
        ("stats", "plain", "{photo}", "--tap", "conv", "--over", "pixel"),
        ("stats", "plain", "{photo}", "--tap", "conv", "--over", "channel", "--stats", "argmax_channel"),
        ("models", "--server", ""),
        ("models", "--token", "secret\n"),
        ("stats", "plain", "{photo}", "--tap", "conv", "--batch", "0"),
        ("models", "--timeout", "-1"),
        ("models", "--token", "secret", "--server", "10.0.0.1:50051"),
        ("models", "--ca", "nothing.pem"),
    ],
)
def test_wrong_command_line_exits_with_2(cli: Trocar, photos: list[Path], words: tuple[str, ...]) -> None:
    done = cli(*(word.format(photo=photos[0]) for word in words))
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err


def test_a_command_whose_stream_fails_ends(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("no image")
    words = ("stats", "plain", tmp_path / "no.png", "--tap", "conv", "--server", server.address)
    done = subprocess.run(
        [sys.executable, "-m", "trocar", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "[INVALID_IMAGE]" in done.stderr


def test_a_text_for_a_model_of_images_is_told(cli: Trocar, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    done = cli("extract", "plain", tmp_path / "a.txt", "--tap", "conv", "--out", tmp_path / "a.safetensors")
    assert done.code == 2
    assert "a.txt is a text, and plain takes images" in done.err


def test_server_that_does_not_answer_exits_with_3(cli: Trocar) -> None:
    done = cli("models", "--server", "127.0.0.1:1")
    assert done.code == 3
    assert "no connection to 127.0.0.1:1" in done.err


@pytest.mark.parametrize(
    ("words", "code", "reason", "message"),
    [
        (("modules", "plane"), 1, "UNKNOWN_MODEL", "plain"),
        (("models", "--server", "127.0.0.1:1"), 3, None, "no connection to 127.0.0.1:1"),
        (
            ("stats", "plain", "{photo}", "--tap", "conv", "--stats", "meen"),
            2,
            None,
            "not 'meen'; nearest: mean",
        ),
        (("modles",), 2, None, "modles"),
        (("stats", "plain", "missing.png", "--tap", "conv"), 2, None, "missing.png"),
        (("plan", "plain"), 2, None, "--tap"),
    ],
)
def test_failures_are_one_json_object_with_json(
    cli: Trocar, photos: list[Path], words: tuple[str, ...], code: int, reason: str | None, message: str
) -> None:
    done = cli(*(word.format(photo=photos[0]) for word in words), "--json")
    assert (done.code, done.out) == (code, "")
    error = done.json_err
    assert (error["reason"], error["exit_code"]) == (reason, code)
    assert message in error["message"]


def test_file_that_cannot_be_written_is_named(cli: Trocar, photos: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "missing" / "f.safetensors"
    done = cli("extract", "plain", photos[0], "--tap", "conv", "--out", out)
    assert done.code == 2
    assert "missing" in done.err


def test_help_says_what_the_exit_codes_mean(cli: Trocar) -> None:
    assert "3 the server cannot be reached" in " ".join(cli("extract", "--help").out.split())


def test_convert_writes_a_state_dict_as_safetensors(cli: Trocar, tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "w.pth")
    done = cli("admin", "convert", tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert done.code == 0
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["weight"], [0, 1, 2])


def test_version_is_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trocar", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"trocar {trocar.__version__}\n"


def test_help_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys\nfrom trocar._cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'trocar_server', 'matplotlib', 'structlog'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_fid_of_a_folder_with_itself_is_zero(cli: Trocar, photos: list[Path]) -> None:
    folder = photos[0].parent
    done = cli("analyse", "fid", "plain", folder, folder, "--at", "conv2", "--batch", 2, "--json")
    assert (done.code, done.json["count_a"], done.json["channels"]) == (0, 5, 4)
    assert done.json["distance"] == pytest.approx(0, abs=1e-12)


def test_cka_is_the_clients_and_draws(
    cli: Trocar, client: trocar.Client, photos: list[Path], tmp_path: Path
) -> None:
    taps = ("--tap", "conv", "--tap", "fc")
    done = cli("analyse", "cka", "plain", photos[0].parent, *taps, "--plot", tmp_path / "cka.png", "--json")
    np.testing.assert_array_equal(done.json["matrix"], client.cka("plain", photos, ["conv", "fc"]).matrix)
    assert (tmp_path / "cka.png").read_bytes().startswith(b"\x89PNG")


def test_dead_is_the_clients(cli: Trocar, client: trocar.Client, photos: list[Path]) -> None:
    done = cli("analyse", "dead", "plain", *photos, "--batch", 2)
    assert done.out == f"{client.dead_channels('plain', photos)}\n"


def test_diff_of_a_model_with_itself_agrees(cli: Trocar, photos: list[Path]) -> None:
    names = ("--tap", "conv", "--tap-other", "conv")
    done = cli("compare", "plain", *photos, "--other", "plain", *names, "--batch", 2)
    assert done.code == 0
    assert "feature maps agree within a relative error of 1e-05" in done.out


def test_an_analysis_of_an_unknown_model_says_which(cli: Trocar, photos: list[Path]) -> None:
    done = cli("analyse", "cka", "plain", *photos, "--tap", "fc", "--other", "missing", "--other-tap", "fc")
    assert (done.code, done.out) == (1, "")
    assert "[UNKNOWN_MODEL]\nof missing" in done.err


def test_an_analysis_that_refuses_its_inputs_is_a_usage_error(cli: Trocar, photos: list[Path]) -> None:
    done = cli("analyse", "cka", "plain", photos[0], "--tap", "fc")
    assert done.code == 2
    assert "at least 2 samples" in done.err
