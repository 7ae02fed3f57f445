"""The `demo` command, step by step."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import trocar
from trocar._base.replacement import write_file
from trocar._base.tables import size_text
from trocar._cli.commands.inspection.modules_command import tree_table
from trocar._cli.console import show
from trocar._cli.demo.demo_sources import find_sources
from trocar._cli.demo.hosting import CONFIG, MODEL_ID, WEIGHTS_FILE, convert, serving
from trocar._cli.demo.text import sentences
from trocar._cli.demo.tour import CAM_AT, TAPS, save_results, show_classes, show_shapes, show_statistics
from trocar._cli.demo.training import fine_tuning
from trocar._cli.failures import refuse
from trocar_api.value_words import not_one_of

_TREE_DEPTH = 2


def demo(
    which: Annotated[
        str,
        typer.Argument(
            metavar="images|train|text",
            help="images: look inside a model that knows ImageNet. train: fine-tune it on digits. "
            "text: sentences, and which tokens make two alike.",
        ),
    ] = "images",
    *,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", file_okay=False, help="Folder for the results; created if missing."),
    ] = Path("demo-output"),
) -> None:
    """Serve a real pretrained model and look inside it, or fine-tune it.

    Models and data come from PyPI packages. A real server runs on a free port of this machine for as long as
    the demo does; with a CUDA GPU it uses that.
    """
    if which not in _DEMOS:
        refuse(f"the demo {not_one_of(which, _DEMOS)}")
    _DEMOS[which](out)


def images(out: Path) -> None:
    """Look inside EfficientNet-Lite0, trained on ImageNet, on two photographs."""
    sources = find_sources()
    out.mkdir(parents=True, exist_ok=True)
    config = out / "server.toml"

    _step("A PyTorch checkpoint becomes a safetensors file; the server reads nothing else")
    _command("admin convert", sources.checkpoint.name, out / WEIGHTS_FILE)
    typer.echo(convert(sources.checkpoint, out / WEIGHTS_FILE))

    _step(f"A model of your own is a few lines of {config}")
    write_file(config, CONFIG)
    typer.echo(CONFIG)
    _command("serve", "--config", config, "--port", 0)
    started = time.perf_counter()
    with serving(config, out) as address, trocar.connect(address) as client:
        device = client.server_info().device
        typer.echo(f"ready on {address} after {time.perf_counter() - started:.1f} s, device {device}")
        _look_inside(client, sources.photographs, out)
    show(Text("The server has stopped", style="bold"))
    for name, what in RESULTS.items():
        typer.echo(f"{out / name}  {size_text((out / name).stat().st_size)}, {what}")


RESULTS = {
    "feature-maps.png": "the picture",
    "cam.png": "where in the photographs the classes come from",
    "features.safetensors": "the feature maps of both photographs",
    WEIGHTS_FILE: "the weights",
    "server.toml": "the server's configuration",
    "server.log": "what it logged",
}


def _look_inside(client: trocar.Client, photographs: Iterable[Path], out: Path) -> None:
    _step("What is inside: client.modules()")
    tree = client.modules(MODEL_ID)
    kept = [module for module in tree.walk() if module.depth <= _TREE_DEPTH]
    show(tree_table(kept))
    typer.echo(f"{len(tree) - len(kept)} deeper modules are not shown")

    given = list(photographs)
    _step(f"One pass, {len(TAPS)} taps: client.extract() of {' and '.join(image.name for image in given)}")
    maps = client.extract(MODEL_ID, given, TAPS)
    show_shapes(maps)
    started = time.perf_counter()
    again = client.extract(MODEL_ID, given, TAPS)
    took_ms, computed_ms = (time.perf_counter() - started) * 1000, again.timing.compute_s * 1000
    typer.echo(f"the same again took {took_ms:.0f} ms, {computed_ms:.0f} of them to compute")

    _step("Their statistics, computed on the server")
    show_statistics(maps)

    _step("What the model sees")
    categories = client.model(MODEL_ID).categories
    show_classes(maps["logits"], categories, given)
    save_results(maps, categories, given, out)

    _step(f"Where it sees them: client.grad_cam(at={CAM_AT!r}), from one backward pass")
    cam = client.grad_cam(MODEL_ID, given, at=CAM_AT)
    cam.plot(out / "cam.png", sample=None)
    typer.echo(repr(cam))


def _step(title: str) -> None:
    show(Text(f"\n{title}", style="bold"))


def _command(*words: object) -> None:
    show(Text(f"$ trocar {' '.join(map(str, words))}", style="dim"))


_DEMOS: dict[str, Callable[[Path], None]] = {"images": images, "train": fine_tuning, "text": sentences}
"""By the word that chooses them."""
