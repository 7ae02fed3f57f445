"""Training: the cost of training through the service.

A step against the same step of a local loop, in a separate process, in turn; epochs of a new head with and
without cached features; the memory of a second trainer on the same base.
"""

import multiprocessing
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import trocar
from benchmarks.measuring import Effort
from benchmarks.report import Row, Table, row
from benchmarks.served import Server, served

_ROUNDS, _WARM_UP = 7, 2
_BATCH, _SAMPLES, _SIDE = 32, 1024, 112
_LR = 0.01


def _batch() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    images = random.standard_normal((_BATCH, 3, 224, 224), np.float32)
    return images, random.integers(0, 10, _BATCH)


def _local_loop(pipe: Connection) -> None:
    """Reply with the seconds of a step in plain torch."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    from trocar_server.engine.schedule.allocator import keep_freed_memory

    keep_freed_memory()  # as `trocar serve` does: the comparison is of the service, not of the allocator
    images, labels = map(torch.from_numpy, _batch())
    while (trainable := pipe.recv()) is not None:
        torch.manual_seed(0)
        model: Any = resnet18(weights=None)
        model.fc = nn.Linear(512, 10)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.startswith(trainable)
        for path, module in model.named_modules():
            module.training = not path or any(p.requires_grad for p in module.parameters())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_LR)
        pipe.send(None)
        while pipe.recv():
            started = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            pipe.send(time.perf_counter() - started)


def step_cost(
    client: trocar.Client, pipe: Connection, trainable: tuple[str, ...], note: str, effort: Effort
) -> Row:
    """Compare a step through the service with one of the local loop; they take turns."""
    images, labels = _batch()
    with client.train(
        "resnet18", head=10, trainable=trainable, optimizer=trocar.training.sgd(lr=_LR)
    ) as trainer:
        pipe.send(trainable or ("",))
        pipe.recv()
        ours, local = [], []
        for _ in range(max(effort.of(_ROUNDS), _WARM_UP + 1)):
            started = time.perf_counter()
            trainer.step(images, labels)
            ours.append(time.perf_counter() - started)
            pipe.send(True)
            local.append(pipe.recv())
        pipe.send(False)
    ratio = statistics.median(ours[_WARM_UP:]) / statistics.median(local[_WARM_UP:])
    return row(f"resnet18, batch {_BATCH}, a step, {note}, against a local loop", ratio, 1.05)


def cached_epochs(client: trocar.Client, effort: Effort) -> list[Row]:
    """Compare epochs of a new head on cached features with those that run the whole model."""
    random = np.random.default_rng(1)
    images = random.standard_normal((effort.of(_SAMPLES), 3, _SIDE, _SIDE), np.float32)
    labels = np.arange(len(images)) % 10
    seconds: dict[bool, list[float]] = {}
    totals: dict[bool, float] = {}
    for is_cached, epochs in ((True, 10), (False, 3)):
        with client.train(
            "resnet18", head=10, trainable="fc", optimizer=trocar.training.sgd(lr=_LR)
        ) as trainer:
            history = trainer.fit(
                (images, labels),
                epochs=epochs,
                batch_size=_BATCH,
                checkpoint_every=10_000,
                feature_cache=is_cached,
                progress=False,
            )
        seconds[is_cached] = _epoch_seconds(history)
        totals[is_cached] = history[-1].time_s - history[0].time_s
    one = statistics.median(seconds[True]) / statistics.median(seconds[False])
    ten = totals[True] / (statistics.median(seconds[False]) * 10)
    return [
        row(
            f"resnet18, a new head, {len(images):,} images of {_SIDE} x {_SIDE}: an epoch from kept features",
            one,
            0.01,
            f"1/{1 / one:.0f}",
        ),
        row("the same: ten epochs in all, features computed once", ten, 0.125),
    ]


def _epoch_seconds(history: trocar.training.History) -> list[float]:
    """Return the seconds of every epoch but the first."""
    times = [event.time_s for event in history.of_kind("epoch")]
    return [later - earlier for earlier, later in pairwise(times)]


def memory_of_a_second(client: trocar.Client, server: Server) -> Row:
    """Compare the memory that a second trainer adds to the server with the memory that it reports."""
    images, labels = _batch()
    spec: dict[str, Any] = {
        "head": 10,
        "trainable": ["layer4", "fc"],
        "optimizer": trocar.training.adam(lr=1e-4),
    }
    spec["saved_tensors"] = trocar.training.save_on_disk(
        1 << 30
    )  # all in memory; freed memory goes back while it exists
    with client.train("resnet18", **spec) as first:
        first.step(images, labels)
        before = server.memory_bytes()
        with client.train("resnet18", **spec) as second:
            second.step(images, labels)
            grown = server.memory_bytes() - before
            own = second.info().byte_count
    return row(
        "resnet18, layer4 and head, Adam: a second trainer's memory, against its own tensors",
        grown / own,
        1.1,
    )


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    context.Process(target=_local_loop, args=(child,), daemon=True).start()
    with served(["resnet18=random:0"]) as server, trocar.connect(server.address, timeout_s=600) as client:
        rows = [
            memory_of_a_second(client, server),  # before anything was freed that it could use
            step_cost(client, pipe, ("fc",), "a new head", effort),
            step_cost(client, pipe, ("layer4", "fc"), "layer4 and head", effort),
            step_cost(client, pipe, (), "the whole model", effort),
            *cached_epochs(client, effort),
        ]
        pipe.send(None)
    return [Table("Training", rows, note="The client, the server and the local loop are three processes.")]
