"""On a CUDA GPU: served values, gradients and trained weights, against torch on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import trocar
from tests.support.models.surgical_models import Recurrent
from tests.support.oracles.oracle import noise, rebuilt_by_name, same_bits
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda
RELATIVE, ABSOLUTE = 2e-3, 2e-4
"""Tolerances: convolutions of a backward pass add in another order each time, in TF32, and later steps of a
training move apart."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    models = {"resnet18": {"weights": "random:0"}, "vit_b_16": {"weights": "random:0"}}
    with running_server(models=models, device="cuda:0", data_dir=tmp_path) as server:
        yield server


@pytest.fixture
def client(running: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(running.address) as connected:
        yield connected


def on_gpu(name: str) -> Any:
    return rebuilt_by_name(name).cuda()


def outputs_on_gpu(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output of the last call of every module that returns one tensor."""
    found: dict[str, torch.Tensor] = {}

    def keep(path: str, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            found[path] = output.clone()

    for path, module in model.named_modules():
        module.register_forward_hook(lambda *given, path=path: keep(path, given[2]))
    with torch.inference_mode():
        model(images.cuda())
    return {path: value.cpu() for path, value in found.items()}


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_every_module_gives_the_bits_of_torch(client: trocar.Client, name: str) -> None:
    model, images = on_gpu(name), noise(2, 3, 224, 224)
    found = client.extract(name, images, trocar.tap("**"))
    expected = outputs_on_gpu(model, torch.from_numpy(images))
    compared = [path for path in found if path in expected and path]
    assert len(compared) > 50
    assert [path for path in compared if not same_bits(found[path], expected[path])] == []


def test_an_edit_is_the_one_that_a_hook_would_make(client: trocar.Client) -> None:
    model, images, vector = on_gpu("resnet18"), noise(2, 3, 224, 224), noise(256)
    shift = (torch.from_numpy(vector).cuda().double() * 0.5).float().reshape(1, -1, 1, 1)
    model.layer3.register_forward_hook(lambda *given: given[2] + shift)
    edits = [trocar.edit("layer3", "steer", vector, alpha=0.5)]
    found = client.extract("resnet18", images, "fc", edits=edits)
    with torch.inference_mode():
        assert same_bits(found["fc"], model(torch.from_numpy(images).cuda()).cpu())


def test_gradients_are_those_of_autograd(client: trocar.Client) -> None:
    model, images = on_gpu("resnet18"), noise(2, 3, 224, 224)
    found = client.extract("resnet18", images, trocar.tap("layer3", gradient=True), of=trocar.logit(3))
    kept: list[torch.Tensor] = []
    model.layer3.register_forward_hook(lambda *given: kept.append(given[2]))
    score = model(torch.from_numpy(images).cuda())[:, 3].sum()
    (expected,) = torch.autograd.grad(score, kept)
    (value,) = found.values()
    torch.testing.assert_close(
        torch.from_numpy(np.array(value)), expected.cpu(), rtol=RELATIVE, atol=ABSOLUTE
    )


def test_statistics_are_those_of_numpy(client: trocar.Client) -> None:
    images = noise(4, 3, 224, 224)
    tap = trocar.tap("layer*", stats=["mean", "std", "min", "max", "l2", "zero_fraction"], over="channel")
    found = client.extract("resnet18", images, tap)
    for path, value in found.items():
        wide = np.array(value).astype(np.float64)
        axes = (0, 2, 3)
        expected = {
            "mean": wide.mean(axes),
            "std": wide.std(axes),
            "min": wide.min(axes),
            "max": wide.max(axes),
            "l2": np.sqrt(np.square(wide).sum(axes)),
            "zero_fraction": (wide == 0).mean(axes),
        }
        for name, numbers in expected.items():
            np.testing.assert_allclose(getattr(found.stats[path], name), numbers, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "spool", [None, trocar.training.save_on_disk("16MiB")], ids=["without a spool", "with one"]
)
def test_a_trainer_makes_the_steps_of_a_plain_loop(client: trocar.Client, tmp_path: Path, spool: Any) -> None:
    images, labels = noise(8, 3, 64, 64), np.arange(8) % 10
    model = rebuilt_by_name("resnet18")
    torch.manual_seed(5)
    model.fc = nn.Linear(512, 10)
    model.cuda().train()
    model.fc.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.from_numpy(images).cuda()), torch.from_numpy(labels).cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trainer = client.train(
        "resnet18",
        head=10,
        optimizer=trocar.training.sgd(lr=0.001, momentum=0.9),
        gradient_edits=trocar.training.gradient_edit("fc.weight", "clamp", -0.1, 0.1),
        seed=5,
        saved_tensors=spool,
    )
    found = [trainer.step(images, labels).loss for _ in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-2)
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    torch.testing.assert_close(weights["fc.weight"], model.fc.weight.detach().cpu(), rtol=2e-2, atol=1e-3)


def test_too_little_memory_is_told_and_the_next_call_is_right(client: trocar.Client) -> None:
    images = noise(64, 3, 224, 224)
    client.extract("resnet18", images[:1], "layer1")
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.raises(trocar.TrocarError) as caught:
            client.extract("resnet18", images, "layer1")
        assert caught.value.reason == "OUT_OF_MEMORY"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = client.extract("resnet18", images, "layer1")
    expected = outputs_on_gpu(on_gpu("resnet18"), torch.from_numpy(images))
    assert same_bits(found["layer1"], expected["layer1"])


def test_a_server_tells_what_its_gpu_does(client: trocar.Client) -> None:
    info = client.server_info()
    assert info.device == "cuda:0"
    client.load("resnet34", "random:1")
    assert client.extract("resnet34", noise(1, 3, 64, 64), "fc")["fc"].shape == (1, 1000)
    client.unload("resnet34")


@pytest.fixture
def recurrent(tmp_path: Path) -> Iterator[trocar.Client]:
    models = {"recurrent": custom(Recurrent, (5, 6))}
    with (
        running_server(models=models, device="cuda:0", data_dir=tmp_path) as server,
        trocar.connect(server.address) as connected,
    ):
        yield connected


def test_gradients_go_through_recurrent_layers_in_eval_mode(recurrent: trocar.Client) -> None:
    """Which cuDNN refuses; the CPU has one kernel for both modes."""
    rows, model = noise(2, 5, 6), rebuilt(Recurrent)
    taps = [
        trocar.tap("lstm/in", gradient=True, alias="x"),
        trocar.tap("gru/param(weight_hh_l1)", gradient=True, alias="w"),
    ]
    found = recurrent.extract("recurrent", rows, taps, of=trocar.logit(1))
    x = torch.from_numpy(rows).requires_grad_()
    score = model(x)[..., 1].sum()
    for name, expected in zip("xw", torch.autograd.grad(score, [x, model.gru.weight_hh_l1]), strict=True):
        value = torch.from_numpy(np.array(found[name]))
        torch.testing.assert_close(value, expected, rtol=RELATIVE, atol=ABSOLUTE)


def test_a_trainer_learns_through_a_frozen_recurrent_layer(recurrent: trocar.Client, tmp_path: Path) -> None:
    rows, labels, model = noise(4, 5, 6), np.arange(20).reshape(4, 5) % 3, rebuilt(Recurrent)
    trainer = recurrent.train(
        "recurrent", trainable=["lstm"], losses="token_cross_entropy", optimizer=trocar.training.sgd(lr=0.1)
    )
    trainer.step(rows, labels)
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    logits = model(torch.from_numpy(rows))
    loss = cross_entropy(logits.reshape(-1, 3), torch.from_numpy(labels).reshape(-1))
    (gradient,) = torch.autograd.grad(loss, [model.lstm.weight_ih_l0])
    expected = model.lstm.weight_ih_l0.detach() - 0.1 * gradient
    torch.testing.assert_close(weights["lstm.weight_ih_l0"], expected, rtol=RELATIVE, atol=ABSOLUTE)
