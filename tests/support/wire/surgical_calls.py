"""Random calls with edits and gradients, those that fail among them, and what they must leave as it was."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import trocar
from tests.support.models import surgical_models, tiny_models
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_count, replicas
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import custom

SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (tiny_models.Plain, (3, 8, 8)),
    "structured": (tiny_models.Structured, (3,)),
    "blocks": (surgical_models.Blocks, (6,)),
    "tied": (surgical_models.Tied, (3,)),
    "recurrent": (surgical_models.Recurrent, (5, 6)),
    "normed": (surgical_models.Normed, (3, 6, 6)),
}
MODELS: dict[str, Any] = {
    name: custom(kind, shape, replicas=2 if name != "tied" else 1) for name, (kind, shape) in SHAPES.items()
}
OUTPUTS = {"structured": '/out["out"]'}
PLACES: dict[str, list[str]] = {
    "plain": ["conv", "relu@0", "relu@1/in", "conv2", "pool", "fc/in"],
    "structured": ['both["first"]', "split[0]", "split/in(scale)", "/in"],
    "blocks": ["first", "second/in", "first.act@1", "third", "head.0"],
    "tied": ["embedding", "norm", "norm/in"],
    "recurrent": ["gru[0]", "attention[0]", "encoder", "head/in"],
    "normed": ["conv", "norm", "relu@0", "down", "relu@1/in"],
}
PARAMETERS: dict[str, list[str]] = {
    "plain": ["conv/param(weight)", "fc/param(bias)"],
    "structured": [],
    "blocks": ["first.linear/param(weight)", "head.1/param(bias)"],
    "tied": ["embedding/param(weight)", "head/param(weight)"],
    "recurrent": ["lstm/param(weight_hh_l0)", "gru/param(bias_ih_l1)", "attention/param(in_proj_weight)"],
    "normed": ["norm/param(weight)", "norm/param(running_mean)", "conv/param(weight)"],
}
SKIPS = {"blocks": "second", "recurrent": "encoder", "normed": "relu@0", "tied": "norm", "plain": "relu@0"}


@dataclass(frozen=True)
class SurgicalCall:
    """One request: all but the client."""

    model_id: str
    values: Array
    taps: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


def mixed_call(chance: random.Random, mark: int) -> SurgicalCall:
    """Return a request that works: plain, with edits or with gradients, of an input that carries the mark."""
    name = chance.choice(list(SHAPES))
    values = _values(name, chance.randint(2, 3), mark)
    output = OUTPUTS.get(name, "/out")
    taps: list[Any] = [output, chance.choice(PLACES[name])]
    kind = chance.random()
    if kind < 0.25:
        return SurgicalCall(name, values, taps)
    options: dict[str, Any] = {
        "edits": [_edit(chance, name, values, mark) for _ in range(chance.randint(1, 3))]
    }
    options["sources"] = {"clean": _values(name, 1, mark + 1)}
    if kind < 0.65:
        return SurgicalCall(name, values, taps, options)
    score = trocar.value(output, function="square")
    options["of"] = score if chance.random() < 0.7 else score + trocar.value(output, reduce="norm")
    if chance.random() < 0.2 and name in ("blocks", "plain"):
        options["of"] = trocar.gradient_penalty(score)
    at = [_gradient(place) for place in PLACES[name]] if name != "tied" else ["embedding/grad_out"]
    parameters = [p.replace("/param(", "/param_grad(") for p in PARAMETERS[name] if "running" not in p]
    return SurgicalCall(name, values, [*taps[:1], *at[:2], *parameters[:1]], options)


def failing_call(chance: random.Random, mark: int) -> SurgicalCall:
    """Return a request that fails, early or late."""
    name = chance.choice(["plain", "blocks", "normed"])
    values = _values(name, 2, mark)
    hopeless = trocar.value("/out")
    cases: list[dict[str, Any]] = [
        {"edits": [trocar.edit(PLACES[name][0], "set", np.zeros(77, np.float32))]},
        {"edits": [trocar.edit("nowhere", "zero")]},
        {"edits": [trocar.edit("/in", "skip")]},
        {"edits": [trocar.edit(PLACES[name][0], "swap", source="nobody")]},
        {
            "edits": [trocar.edit(PLACES[name][0], "swap", source="clean")],
            "sources": {"clean": _values(name, 3, mark)},
        },
        {"of": trocar.logit(10_000)},
        {"of": trocar.value(PLACES[name][0])},
        {"of": hopeless, "options": trocar.options(timeout_s=1e-4)},
        {"edits": [trocar.edit(PARAMETERS[name][0], "scale", 2)], "options": trocar.options(timeout_s=2e-3)},
        {
            "of": hopeless,
            "edits": [trocar.edit(PARAMETERS[name][0], "scale", 2)],
            "options": trocar.options(timeout_s=4e-3),
        },
        {"of": trocar.loss("cross_entropy", np.array([0, 99]))},
    ]
    options = chance.choice(cases)
    last = "fc/grad_out" if name != "blocks" else "head.1/grad_out"
    return SurgicalCall(name, values, [last, PLACES[name][0]] if "of" in options else ["/out"], options)


def run(client: trocar.Client, call: SurgicalCall) -> trocar.FeatureMaps:
    """Make one call."""
    return client.extract(call.model_id, call.values, call.taps, **call.options)


def stress(client: trocar.Client, chance: random.Random, count: int, failing: float = 0.3) -> Counter[str]:
    """Make so many calls, and return how they ended."""
    outcomes: Counter[str] = Counter()
    for mark in range(count):
        call = failing_call(chance, mark) if chance.random() < failing else mixed_call(chance, mark)
        try:
            run(client, call)
            outcomes["done"] += 1
        except (trocar.errors.InternalServerError, trocar.errors.InputRejectedError):
            raise
        except trocar.TrocarError as error:
            outcomes[type(error).__name__] += 1
    return outcomes


def equal(one: trocar.FeatureMaps, other: trocar.FeatureMaps) -> bool:
    """Compare replies bit for bit."""
    return (
        list(one) == list(other)
        and one.objective == other.objective
        and all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
    )


def footprint(server: RunningServer) -> Mapping[str, Any]:
    """Return what no call may change: of the weights a hash, of every replica hooks, forwards and tables."""
    return server.on_owner(lambda: {name: _footprint(server, name) for name in server.engine.deployments})


def _footprint(server: RunningServer, name: str) -> Any:
    base: Any = server.engine.deployment(name).hosted.module
    weights = {key: torch.hash_tensor(value).item() for key, value in base.state_dict().items()}
    return weights, sorted(_tree(module) for module in replicas(server, name))


def _tree(module: Any) -> list[Any]:
    found: list[Any] = [hook_count(module)]
    for path, child in module.named_modules():
        tables = {**child._parameters, **child._buffers}
        identities = sorted((key, id(value)) for key, value in tables.items())
        graphs = sorted(key for key, value in tables.items() if value is not None and value.requires_grad)
        found.append((path, "forward" in vars(child), identities, graphs, sorted(vars(child))))
    return found


def _values(name: str, batch: int, mark: int) -> Array:
    if name == "tied":
        return np.random.default_rng(mark).integers(0, 7, (batch, 3))
    return noise(batch, *SHAPES[name][1], seed=mark) + np.float32(mark % 7)


def _gradient(place: str) -> str:
    path, slash, port = place.partition("/")
    if slash:
        return f"{path}/grad_{port}"
    base, bracket, rest = path.partition("[")
    return f"{base}/grad_out{bracket}{rest}"


def _edit(chance: random.Random, name: str, values: Array, mark: int) -> trocar.Edit:
    place = chance.choice(PLACES[name])
    options: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        (place, "scale", (chance.uniform(-2, 2),), {}),
        (place, "noise", (0.5,), {"seed": mark}),
        (place, "zero", (), {"samples": [0]}),
        (place, "clamp", (), {"low": 0.1}),
        (place, "resample", (), {"seed": mark}),
        (place, "swap", (), {"source": "clean"}),
        (place, "mean_ablate", (), {"order": "after"}),
    ]
    options += [(p, "scale", (chance.uniform(0.5, 2),), {}) for p in PARAMETERS[name]]
    options += [(p, "noise", (0.1,), {"seed": mark}) for p in PARAMETERS[name]]
    if name in SKIPS and chance.random() < 0.2:
        return trocar.edit(SKIPS[name], "skip")
    operation: Any
    selector, operation, given, more = chance.choice(options)
    return trocar.edit(selector, operation, *given, **more)
