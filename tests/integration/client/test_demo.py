"""`trocar demo` as `make demo` runs it: a process of its own, a real server, a real pretrained model."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from safetensors.numpy import load_file
from torchvision.models import ResNet50_Weights
from torchvision.transforms import InterpolationMode, functional

import trocar
from tests.support.files.markdown import blocks
from tests.support.servers import warm_python
from tests.support.wire.pictures import colour_count
from trocar._cli.demo import command, demo_sources, hosting
from trocar._cli.demo.demo_sources import find_sources
from trocar._cli.demo.hosting import MODEL_ID, WEIGHTS_FILE, serving

PAGE = Path(__file__).parents[3] / "docs/demo.md"
COMMAND = [sys.executable, "-m", "trocar", "demo", "--out"]


@dataclass(frozen=True)
class Run:
    """A finished demo."""

    code: int
    text: str
    folder: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    done = subprocess.run([*COMMAND, folder], capture_output=True, text=True, timeout=500, check=False)
    return Run(done.returncode, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def expected_logits() -> torch.Tensor:
    """What the package's own model computes in this process, from the `.pth` that it comes with."""
    model = EfficientNet.from_name(MODEL_ID).eval()
    model.load_state_dict(torch.load(find_sources().checkpoint, weights_only=True))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.stack([_prepared(path) for path in find_sources().photographs]))
    return logits


def _prepared(path: Path) -> torch.Tensor:
    image: Any = Image.open(path).convert("RGB")  # torchvision says Tensor, and takes both
    resized = functional.resize(image, [224], interpolation=InterpolationMode.BICUBIC, antialias=True)
    pixels: torch.Tensor = functional.pil_to_tensor(functional.center_crop(resized, [224]))
    return (pixels.float() - 127) / 128


def address_of(text: str) -> str:
    match = re.search(r"ready on (127\.0\.0\.1:\d+)", text)
    assert match, text
    return match.group(1)


def assert_nobody_listens(address: str) -> None:
    with trocar.connect(address, retries=0) as client, pytest.raises(trocar.errors.ServerUnavailableError):
        client.server_info()


def test_demo_succeeds_and_stops_its_server(demo: Run) -> None:
    assert demo.code == 0, demo.text
    assert_nobody_listens(address_of(demo.text))


def test_demo_prints_module_tree_shapes_statistics_and_classes(demo: Run) -> None:
    lines = [" ".join(line.split()) for line in demo.text.splitlines()]
    assert "│ ├─ 2 MBConvBlock 8,832 1 (1, 24, 56, 56) batch channels height width" in lines
    assert "_blocks.10 _blocks.10 MBConvBlock (2, 112, 14, 14) float32 175.6 kB" in lines
    assert any(line.startswith("logits (2, 1000) -0.06") for line in lines)
    cat, cup = lines.index("chelsea.png probability"), lines.index("coffee.png probability")
    assert lines[cat + 2].startswith("Egyptian cat 0.3")
    assert lines[cup + 2].startswith("espresso 0.9")


def test_saved_features_are_the_models_own(demo: Run, expected_logits: torch.Tensor) -> None:
    maps = load_file(demo.folder / "features.safetensors")
    np.testing.assert_allclose(maps["logits"], expected_logits.numpy(), rtol=1e-3, atol=1e-3)
    assert maps["head"].shape == (2, 1280, 7, 7)


def test_model_names_the_photographs_in_this_process_too(expected_logits: torch.Tensor) -> None:
    categories = ResNet50_Weights.DEFAULT.meta["categories"]
    assert [categories[index] for index in expected_logits.argmax(1)] == ["Egyptian cat", "espresso"]


def test_picture_is_a_png_with_something_on_it(demo: Run) -> None:
    with Image.open(demo.folder / "feature-maps.png") as picture:
        assert picture.height > 400
        assert picture.width > 1200
        assert colour_count(picture) > 10_000


def test_the_cam_picture_is_of_what_the_photographs_show(demo: Run) -> None:
    assert "(2, 7, 7) of Egyptian cat (285): 8.97" in demo.text
    assert "; espresso (967): 10.9" in demo.text
    with Image.open(demo.folder / "cam.png") as picture:
        assert picture.width > picture.height > 300
        assert colour_count(picture) > 10_000


def test_demo_says_what_it_wrote(demo: Run) -> None:
    written = {path.name for path in demo.folder.iterdir()}
    named = {name for name in command.RESULTS if str(demo.folder / name) in demo.text}
    assert named == set(command.RESULTS)
    assert named <= written
    assert "server.ready" not in written


def test_its_page_shows_what_the_demo_prints(demo: Run) -> None:
    (shown,) = [block.text for block in blocks(PAGE) if "Egyptian cat" in block.text]
    printed = {_without_digits(line) for line in demo.text.splitlines()}
    lines = [line for line in shown.splitlines() if line and line != "   ..."]
    assert [line for line in lines if _without_digits(line) not in printed] == []


def _without_digits(line: str) -> str:
    """Leave out what differs between machines: numbers, and so the width of a column."""
    return " ".join(re.sub(r"[\d.─-]+", "#", line).split())


CONVERTED = """
import shutil, sys
from pathlib import Path
from trocar._cli.demo import command

def convert(checkpoint, target):
    sys.stdout.reconfigure(line_buffering=True)
    return str(shutil.copy(sys.argv[2], target))

command.convert = convert
command.demo(out=Path(sys.argv[1]))
"""
"""The demo with weights that were converted before."""


def test_demo_stops_its_server_when_it_is_terminated(demo: Run, tmp_path: Path) -> None:
    words = [sys.executable, "-c", CONVERTED, str(tmp_path), str(demo.folder / WEIGHTS_FILE)]
    with warm_python.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(address_of(line) for line in process.stdout if line.startswith("ready on"))
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert_nobody_listens(address)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server of `serving` begin with its modules imported."""
    quick = SimpleNamespace(**{**vars(subprocess), "Popen": warm_python.Popen})
    monkeypatch.setattr(hosting, "subprocess", quick)


@pytest.mark.usefixtures("warm")
def test_server_is_gone_when_the_tour_fails(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[models.resnet18]\nweights = "random:0"\n')
    addresses = []

    def tour() -> None:
        with serving(config, tmp_path) as address:
            addresses.append(address)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tour()
    assert_nobody_listens(addresses[0])


@pytest.mark.usefixtures("warm")
def test_server_that_does_not_start_shows_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[models.resnet18]\nweights = "nothing.safetensors"\n')
    with pytest.raises(typer.Exit) as stopped, serving(config, tmp_path):
        pass
    assert stopped.value.exit_code == 1
    assert "nothing.safetensors" in capsys.readouterr().err


def test_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        demo_sources, "find_spec", lambda name: None if name == "skimage" else find_spec(name)
    )
    with pytest.raises(typer.Exit) as stopped:
        find_sources()
    assert stopped.value.exit_code == 2
    assert 'the demo needs skimage: pip install "trocar[demo]"' in capsys.readouterr().err
