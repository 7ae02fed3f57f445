"""Mistakes of new users: each message says what came, what was expected, and how to mend it."""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.config import read_config
from trocar_server.errors import ServiceError
from trocar_server.models import parse_model_argument

NUMERICS: dict[str, Any] = {"numerics": "fast"}
X = np.zeros((4, 3, 8, 8), np.float32)
MOST_FRAMES = 5
"""Of the client, in the traceback of a mistake."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models={"plain": custom(Plain, (3, 8, 8))}, device="cpu") as running:
        yield running


Mistake = Callable[[Any], object]  # untyped, as a type checker finds some of them

MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    "address": (lambda _: trocar.connect(50051), ("50051", "write a text", "gpu1:50051")),  # type: ignore[arg-type]
    "no-inputs": (
        lambda client: client.extract("plain", None, ["conv"]),
        ("inputs: none given (None)", "an array"),
    ),
    "no-samples": (lambda client: client.extract("plain", X[:0], ["conv"]), ("empty", "at least one sample")),
    "many-samples": (
        lambda client: client.extract("plain", np.zeros((5000, 3, 8, 8), np.float32), ["conv"]),
        ("5000 samples", "4096", "send a smaller batch"),
    ),
    "no-taps": (lambda client: client.extract("plain", X, []), ("0 given", "'layer4'")),
    "model-number": (lambda client: client.extract(5, X, "conv"), ("model_id is 5; give a text",)),
    "model-object": (
        lambda client: client.extract(client.model("plain"), X, "conv"),
        ("model_id is", "for example 'plain'"),
    ),
    "model-empty": (lambda client: client.extract("", X, "conv"), ("model_id: is empty", "trocar models")),
    "edits-none": (lambda client: client.extract("plain", X, "conv", edits=None), ("edits is None",)),
    "edits-function": (
        lambda client: client.extract("plain", X, "conv", edits=len),
        ("edits is", "trocar.edit"),
    ),
    "tap-without-selector": (
        lambda client: client.extract("plain", X, trocar.tap(None)),  # type: ignore[arg-type]
        ("the selector of a tap is None",),
    ),
    "timeout": (
        lambda client: client.extract("plain", X, "conv", options=trocar.options(timeout_s=cast("Any", "5"))),
        ("timeout_s is '5'; give a number of seconds",),
    ),
    "tls": (
        lambda _: trocar.connect("localhost", tls="ca.pem"),  # type: ignore[arg-type]
        ("tls is 'ca.pem'", "trocar.TlsOptions"),
    ),
    "batches": (lambda client: list(client.extract_stream("plain", 5, "conv")), ("batches is 5",)),
    "sparse": (
        lambda client: client.extract("plain", torch.zeros(4, 3, 8, 8).to_sparse(), "conv"),
        ("torch.sparse_coo", "to_dense()"),
    ),
    "meta": (
        lambda client: client.extract("plain", torch.zeros(4, 3, 8, 8, device="meta"), "conv"),
        ("meta device has no values",),
    ),
    "rank": (
        lambda client: client.extract("plain", X[0, 0], "conv"),
        ("an array of 2 dimensions, and the layer takes 4", "(batch, 3, 8, 8)"),
    ),
    "channels": (
        lambda client: client.extract("plain", X[:, :2], "conv"),
        ("the layer takes", "(batch, 3, 8, 8)"),
    ),
    "class-name": (
        lambda client: client.gradients("plain", X, of=trocar.logit("tabby")),
        ("no names of classes on the server", "give the number of 'tabby'"),
    ),
    "local-class": (
        lambda _: trocar.connect("local", models=Plain),
        ("models is the class Plain", "Plain(...)"),
    ),
    "local-function": (lambda _: trocar.connect("local", models=5), ("models is 5", "resnet18")),
    "taps-none": (
        lambda client: client.extract("plain", X, None),
        ("taps is None", "['layer4']", "trocar.tap"),
    ),
    "taps-number": (lambda client: client.plan("plain", None, taps=5), ("taps is 5", "['layer4']")),
    "at-none": (
        lambda client: client.gradients("plain", X, of=trocar.logit(1), at=None),
        ("at is None", "['layer4']"),
    ),
    "generator": (
        lambda client: client.extract("plain", (X for _ in range(2)), ["conv"]),
        ("a generator cannot be an input", "list(...)", "extract_stream"),
    ),
    "glob": (
        lambda client: client.extract("plain", Path().glob("*.png"), ["conv"]),
        ("cannot be an input", "list(...)"),
    ),
    "set": (lambda client: client.extract("plain", {1, 2}, ["conv"]), ("a set cannot be an input", "list(")),
    "list-with-none": (lambda client: client.extract("plain", [X, None], ["conv"]), ("a list with None",)),
    "tap-of-other-model": (
        lambda client: client.extract("plain", X, "model.conv"),
        ("no module 'model.conv'", "nearest: conv"),
    ),
    "tap-parameter": (lambda client: client.extract("plain", X, "fc.weight"), ("'fc/param(weight)'",)),
    "tap-statistic": (
        lambda client: client.extract("plain", X, "conv:mean"),
        ("trocar.tap('conv', stats=['mean'])",),
    ),
    "tap-argument": (
        lambda client: client.extract("plain", X, tap="conv"),
        ("extract has no argument 'tap'", "did you mean taps?"),
    ),
    "layers-argument": (lambda client: client.extract("plain", X, layers="conv"), ("it is taps=",)),
    "by-position": (
        lambda client: client.gradients("plain", X, None, "conv"),
        ("gradients takes", "by position (model_id, inputs", "by name"),
    ),
    "no-taps-argument": (lambda client: client.extract("plain", X), ("extract needs taps",)),
    "target": (
        lambda client: client.grad_cam("plain", X, target=3),
        ("grad_cam has no argument 'target'", "the class is of=trocar.logit(...)"),
    ),
    "rate": (lambda client: client.train("plain", lr=0.1), ("train has no argument 'lr'", "adamw(lr=...)")),
    "metric": (
        lambda client: client.train("plain").fit((X, [0] * 4), metrics=["acuracy"]),
        ("not 'acuracy'", "nearest: accuracy"),
    ),
    "batch-size": (
        lambda client: client.train("plain").fit((X, [0] * 4), batch_size="x"),
        ("batch_size", "whole number"),
    ),
    "options": (
        lambda client: client.extract("plain", X, "conv", options={"numerics": "fast"}),
        ("options is a dict; make it with trocar.options(...)",),
    ),
    "how": (
        lambda client: client.extract("plain", X, "conv", **NUMERICS),
        ("extract has no argument 'numerics'; options=trocar.options(numerics=...)",),
    ),
    "numerics": (
        lambda client: client.extract(
            "plain", X, "conv", options=trocar.options(numerics=cast("Any", "fst"))
        ),
        ("numerics must be one of exact, fast, bf16, not 'fst'; nearest: fast",),
    ),
    "wire": (
        lambda client: client.extract("plain", X, "conv", options=trocar.options(wire=cast("Any", "fp16"))),
        ("wire", "float16", "'fp16'"),
    ),
    "saved-as-pt": (
        lambda client: client.extract("plain", X, "conv").save("a.pt"),
        ("'a.pt' must end in .safetensors", "torch.save"),
    ),
    "saved-as-npz": (
        lambda client: client.extract("plain", X, "conv").save("a.npz"),
        ("'a.npz' must end in .safetensors", "numpy.savez"),
    ),
    "exported-as-pt": (
        lambda client: client.train("plain").export("a.pt"),
        ("'a.pt' must end in .safetensors",),
    ),
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
    "source": (
        lambda client: client.load("timm:vit_giant_nope"),
        ("'timm:vit_giant_nope' is a source", "only the operator", "trocar serve timm:vit_giant_nope"),
    ),
    "own-source": (lambda client: client.load("torchvision:resnet18"), ("load it as 'resnet18'",)),
    "near-source": (
        lambda client: client.load("torchvision:resnet19"),
        ("nearest in torchvision: resnet18",),
    ),
    "train": (
        lambda client: client.train("plain", trainabel="fc"),
        ("train has no argument 'trainabel'", "did you mean trainable"),
    ),
    "loss": (
        lambda client: client.train("plain", losses="cross_entrpy"),
        ("losses[0].name", "not 'cross_entrpy'", "nearest: cross_entropy"),
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
    "call",
    [
        lambda client: client.extract("plian", X, ["conv"]),
        lambda client: client.modules("plian"),
        lambda client: client.predict("plian", X),
        lambda client: client.train("plian"),
        lambda client: list(client.extract_stream("plian", [X], ["conv"])),
        lambda client: client.dataset("abc"),
        lambda client: trocar.extract_dataset(client, "plain", "/none/such", "conv", "/none/out"),
        lambda client: client.delete_dataset("abc"),
        lambda client: client.train("plain").fit("abc"),
        lambda client: client.train("plain").step(X, [0, 1]),
        lambda client: client.extract("plain", X, tap="conv"),
    ],
)
def test_a_traceback_has_the_frames_of_the_caller_and_few_others(
    client: trocar.Client, call: Mistake
) -> None:
    with pytest.raises((trocar.TrocarError, TypeError)) as caught:
        call(client)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert not [line for line in lines if "/grpc/" in line]
    assert not [line for line in lines if "direct cause" in line or "During handling" in line]
    assert [line for line in lines if "test_mistakes.py" in line]
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len([frame for frame in frames if "test_mistakes.py" not in frame.filename]) <= MOST_FRAMES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 5", ("prot: no such setting", "nearest: port")),
        ("[models.a]\nweight = 'DEFAULT'", ("models.a.weight: no such setting", "nearest: weights")),
        ("[server]\nport = 'many'", ("port must be a whole number, not 'many'",)),
        ("[server]\nport = 70000", ("port must be at most 65535, not 70000",)),
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
