"""Mistakes of new users: each message says what came, what was expected, and how to mend it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.config import read_config
from trocar_server.errors import ServiceError
from trocar_server.models import parse_model_argument

X = np.zeros((4, 3, 8, 8), np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models={"plain": custom(Plain, (3, 8, 8))}, device="cpu") as running:
        yield running


Mistake = Callable[[Any], object]  # untyped, as a type checker finds some of them

MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    "address": (lambda _: trocar.connect(50051), ("50051", "write a text", "gpu1:50051")),  # type: ignore[arg-type]
    "no-inputs": (lambda client: client.extract("plain", None, ["conv"]), ("inputs: 0 given", "an array")),
    "no-samples": (lambda client: client.extract("plain", X[:0], ["conv"]), ("empty", "at least one sample")),
    "many-samples": (
        lambda client: client.extract("plain", np.zeros((5000, 3, 8, 8), np.float32), ["conv"]),
        ("5000 samples", "4096", "send a smaller batch"),
    ),
    "no-taps": (lambda client: client.extract("plain", X, []), ("0 given", "'layer4'")),
    "tap": (lambda client: client.extract("plain", X, [3]), ("taps has 3", "'layer4'", "trocar.tap")),
    "channel": (
        lambda client: client.extract("plain", X, "fc", edits=trocar.edit("conv", "zero", channels=[99])),
        ("position 99", "0 to 3"),
    ),
    "edits": (
        lambda client: client.extract("plain", X, "fc", edits="conv"),
        ("no stored edits 'conv'", "'layer3 zero'"),
    ),
    "weights": (lambda client: client.load("resnet34", "IMAGENET"), ("'IMAGENET'", "IMAGENET1K_V1")),
    "train": (
        lambda client: client.train("plain", trainabel="fc"),
        ("train has no argument 'trainabel'", "did you mean trainable"),
    ),
    "loss": (
        lambda client: client.train("plain", losses="cross_entrpy"),
        ("'cross_entropy'", "not 'cross_entrpy'"),
    ),
    "fit": (
        lambda client: client.train("plain").fit((X, [0] * 4), epoch=3),
        ("fit has no argument 'epoch'", "did you mean epochs"),
    ),
    "epochs": (lambda client: client.train("plain").fit((X, [0] * 4), epochs=0), ("epochs", "not 0")),
    "labels": (
        lambda client: client.train("plain").step(X, [0, 1]),
        ("2 entries", "a batch of 4", "first dimension is the batch"),
    ),
    "classes": (lambda client: client.train("plain").step(X, list("abcd")), ("texts", "classes.index(name)")),
    "soft-labels": (
        lambda client: client.train("plain").step(X, np.zeros(4)),
        ("float64", "labels are integers", "(batch, 5)"),
    ),
    "data-set": (lambda client: client.dataset("abc"), ("'abc'", "trocar datasets list")),
    "upload": (lambda client: client.upload_dataset("/none/such", name="x"), ("/none/such does not exist",)),
    "name": (
        lambda client: client.upload_dataset((X, [0] * 4), name="x\n"),
        (r"'x\n'", "printable characters"),
    ),
    "profile": (lambda _: trocar.connect(profile="labb"), ("'labb'", "trocar login SERVER --profile labb")),
    "word": (lambda client: client.predict("plain", "hello"), ("hello", "trocar.texts(...)")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_caller_is_explained(client: trocar.Client, mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises((trocar.TrocarError, TypeError, ValueError, OSError)) as caught:
        call(client)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 5", ("prot: no such setting", "nearest: port")),
        ("[models.a]\nweight = 'DEFAULT'", ("models.a.weight: no such setting", "nearest: weights")),
        ("[server]\nport = 'many'", ("port: ", "integer", "not 'many'")),
        ("[server]\nport = 70000", ("65535", "not 70000")),
    ],
)
def test_a_wrong_setting_is_explained(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ServiceError) as caught:
        read_config(file)
    assert [word for word in words if word not in caught.value.message] == [], caught.value.message


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("resnet18=rand:0", ("'rand:0' is not a source", "random:0", "FILE.safetensors")),
        ("./x.pth", ("'./x.pth' is not a model id", "NAME=FILE.safetensors")),
    ],
)
def test_a_wrong_model_of_a_command_line_is_explained(argument: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_model_argument(argument)
    assert [word for word in words if word not in caught.value.message] == [], caught.value.message
