"""`trocar demo train`: a real fine-tuning, from data on this machine to a hosted model."""

import shutil
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.text import Text

import trocar
from trocar._base.replacement import write_file
from trocar._base.tables import size_text
from trocar._cli.console import show
from trocar._cli.demo.demo_sources import find_sources
from trocar._cli.demo.hosting import CONFIG, DATA_FOLDER, MODEL_ID, WEIGHTS_FILE, convert, serving
from trocar._cli.failures import USAGE, fail
from trocar._result.history import FitEvent, History

Pixels = NDArray[Any]
_TEST_SHARE = 5
_WHITE = 16
SIDE = 96
"""Pixels to which the digits are enlarged for the pretrained model."""
_RESNET = 'weights = "random:0"'
TRAIN_CONFIG = (
    CONFIG.replace("[224]", f"[{SIDE}]").replace("bicubic", "bilinear") + f"\n[models.resnet18]\n{_RESNET}\n"
)


@dataclass(frozen=True)
class Digits:
    """Digits of scikit-learn, 1,797 in all: images (samples, 8, 8, 3) uint8 and labels 0 to 9."""

    images: Pixels
    labels: NDArray[np.int64]

    def enlarged(self, factor: int) -> NDArray[np.float32]:
        """Return them as float32 (samples, 3, 8 * factor, 8 * factor), about -1 to 1, each pixel a square."""
        squares = self.images.repeat(factor, axis=1).repeat(factor, axis=2).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(squares / np.float32(127.5) - 1, dtype=np.float32)


def load_digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and those to test on, in a fixed random order."""
    from sklearn.datasets import load_digits as load  # an extra, and slow to import

    values, labels = map(np.asarray, load(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    grey = np.round(values[order] * (255 / _WHITE)).astype(np.uint8).reshape(-1, 8, 8, 1)
    images, labels = grey.repeat(3, axis=3), labels[order].astype(np.int64)
    first_test = len(labels) - len(labels) // _TEST_SHARE
    return (
        Digits(images[:first_test], labels[:first_test]),
        Digits(images[first_test:], labels[first_test:]),
    )


def fine_tuning(out: Path) -> None:
    """Fine-tune on handwritten digits, through a real server.

    First a new head on EfficientNet-Lite0, pretrained on ImageNet; then all parameters of a resnet18 with
    random weights, with clamped gradients and saved tensors on disk.
    """
    if find_spec("sklearn") is None:
        fail('the demo needs scikit-learn: pip install "trocar[demo]"', USAGE)
    sources = find_sources()
    out.mkdir(parents=True, exist_ok=True)
    config = out / "train.toml"
    shutil.rmtree(out / DATA_FOLDER, ignore_errors=True)  # of an earlier run
    write_file(config, TRAIN_CONFIG)
    convert(sources.checkpoint, out / WEIGHTS_FILE)
    train, test = load_digits()
    typer.echo(f"{len(train.labels)} handwritten digits to train on, {len(test.labels)} to test")
    with serving(config, out) as address, trocar.connect(address, timeout_s=600) as client:
        _new_head(client, train, test, out)
        _whole_model(client, train, test)


def _new_head(client: trocar.Client, train: Digits, test: Digits, out: Path) -> None:
    from trocar._base.figures import save_figure  # needs matplotlib

    _step(f"A new head on {MODEL_ID}: client.train(head=10, trainable='_fc'), trainer.fit(epochs=30)")
    trainer = client.train(
        MODEL_ID, head=10, trainable="_fc", optimizer=trocar.training.adam(lr=3e-3), seed=0, ttl_s=3600
    )
    typer.echo(str(trainer.info()))
    started = time.perf_counter()
    history = trainer.fit(
        (train.images, train.labels),
        epochs=30,
        batch_size=32,
        eval=(test.images, test.labels),
        on_event=_tell,
    )
    typer.echo(f"30 epochs took {time.perf_counter() - started:.1f} s, {_told_of_cache(history)}")
    trainer.publish("digits", categories=[str(digit) for digit in range(10)])
    save_figure(history.plot(), out / "training.png", dpi=110)
    predicted = client.extract("digits", list(test.images), taps="/out")["/out"].argmax(1)
    right = int((predicted == test.labels).sum())
    share = f"{right} of {len(test.labels)} test digits right ({right / len(predicted):.1%})"
    typer.echo(f"model 'digits' is hosted: {share}")
    path = trainer.export(out / "digits.safetensors")
    typer.echo(f"{path}  {size_text(path.stat().st_size)}, its weights for plain PyTorch")
    typer.echo(f"{out / 'training.png'}  the events of the training")
    trainer.close()


def _whole_model(client: trocar.Client, train: Digits, test: Digits) -> None:
    _step("The whole of a resnet18 with random weights, gradients clamped, saved tensors within 8 MiB")
    trainer = client.train(
        "resnet18",
        head=10,
        optimizer=trocar.training.adamw(lr=1e-3),
        gradient_edits=trocar.training.gradient_edit("**", "clamp", -0.1, 0.1),
        saved_tensors=trocar.training.save_on_disk(8 << 20),
    )
    history = trainer.fit(
        (train.enlarged(4), train.labels),
        epochs=3,
        batch_size=32,
        eval=(test.enlarged(4), test.labels),
        on_event=_tell,
    )
    steps = history.of_kind("step")
    written = np.mean([event.get("written_bytes", 0) for event in steps])
    clamped = sum(sum((event.get("changed") or {}).values()) for event in steps)
    typer.echo(
        f"{clamped:,} gradient elements clamped; {size_text(int(written))} of saved tensors written a step"
    )
    trainer.close()


def _told_of_cache(history: History) -> str:
    filled = [event for event in history.of_kind("cache") if event.get("done")]
    return f"{'with' if filled else 'without'} the frozen part's features kept"


def _tell(event: FitEvent) -> None:
    if event.kind == "evaluation" and (event["epoch"] < 3 or (event["epoch"] + 1) % 10 == 0):
        accuracy = event["metrics"]["accuracy"]
        typer.echo(f"epoch {event['epoch'] + 1:2}: test loss {event['loss']:.3f}, accuracy {accuracy:.4f}")


def _step(title: str) -> None:
    show(Text(f"\n{title}", style="bold"))
