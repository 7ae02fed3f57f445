"""Every node of every traceable torchvision model against `create_feature_extractor`, bit for bit.

    python -m tests.sweeps.traceable                        # all models, half an hour on one core
    python -m tests.sweeps.traceable --models resnet18,swin_t

The oracle is torchvision's extractor on a copy that does nothing in place. Models that cannot be traced
must say `NOT_TRACEABLE`, and be those that torchvision's `get_graph_node_names` fails on too. Inputs
are as small as each model takes. Prints one line per model and exits with 1 if any differs.
"""

import argparse
import gc
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchvision.models import get_model, get_model_builder, list_models

from tests.support.oracles.extractor import extracted, node_names
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.replicas import make_meta_replica, make_replica
from trocar_server.surgery.recording.graph import TracedGraph, trace_graph
from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.sessions.nodes import NodeSession, record_nodes
from trocar_server.surgery.sessions.taps import Target
from trocar_server.surgery.structure import leaves

SETTINGS: dict[str, dict[str, Any]] = {
    "vit_h_14": {"image_size": 56},
    "vit_": {"image_size": 64},
}
"""Arguments of the builders by the beginning of the model's name: the first that fits."""

SHAPES: dict[str, tuple[int, ...]] = {
    "vit_h_14": (3, 56, 56),
    "maxvit": (3, 224, 224),
    "inception": (3, 96, 96),
    "quantized_inception": (3, 96, 96),
    "mvit": (3, 16, 224, 224),
    "s3d": (3, 16, 224, 224),
    "swin3d": (3, 4, 64, 64),
    "r3d": (3, 4, 64, 64),
    "mc3": (3, 4, 64, 64),
    "r2plus1d": (3, 4, 64, 64),
}
"""Shape of one sample by the beginning of the model's name; (3, 64, 64) otherwise."""

BATCH_BYTES = 1 << 30
"""The most bytes of values that one pass collects."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="these only, separated by commas")
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.models.split(",") if arguments.models else list_models()
    outcomes = [_outcome(name, arguments.batch) for name in names]
    failed = [name for name, outcome in zip(names, outcomes, strict=True) if outcome.startswith("FAILED")]
    refused = sum(outcome.startswith("NOT_TRACEABLE") for outcome in outcomes)
    equal = len(names) - refused - len(failed)
    print(f"{len(names)} models: {equal} bit-equal, {refused} not traceable, failed: {failed or 'none'}")
    return 1 if failed else 0


def _outcome(name: str, batch: int) -> str:
    started = time.perf_counter()
    try:
        outcome = check(name, batch)
    except Exception as error:  # noqa: BLE001 - one model's failure is a line of the report
        traceback.print_exc()
        outcome = f"FAILED {type(error).__name__}: {error}"
    print(f"{name:<34} {time.perf_counter() - started:6.1f} s  {outcome}", flush=True)
    gc.collect()
    return outcome


def check(name: str, batch: int) -> str:
    """Compare one model; the outcome begins with "ok", "NOT_TRACEABLE" or "FAILED"."""
    torch.manual_seed(7)
    model = _build(name)
    try:
        traced = trace_graph(make_replica(model))
    except ServiceError as error:
        return _refused(model, error)
    if list(traced.names) != node_names(model):
        return "FAILED other names than torchvision's"
    torch.manual_seed(7)
    inputs = torch.rand(batch, *_first(SHAPES, name, (3, 64, 64)))
    records = record_nodes(make_meta_replica(model), traced, [inputs.to("meta")])
    problem = _compare(model, traced, records, inputs) or _compare_output(model, traced, inputs)
    targets = [target for record in records.values() for target in _targets(record)]
    cloned = sum(target.clone for target in targets)
    result = f"{len(traced.names)} nodes, {len(targets)} values, {cloned} of them overwritten later"
    return f"FAILED {problem}" if problem else f"ok {result}"


def _compare(
    model: nn.Module, traced: TracedGraph, records: dict[str, ModuleRecord], inputs: torch.Tensor
) -> str:
    """Return which nodes differ from torchvision's, empty for none."""
    replica = make_replica(model)
    batches = list(_batches(records))
    wrong: list[str] = []
    for names, expected in zip(batches, extracted(model, batches, [inputs]), strict=True):
        session = NodeSession(traced, [target for name in names for target in _targets(records[name])])
        with torch.inference_mode():
            session.run(replica, [inputs.clone()])
        for name in names:
            oracle = {p: leaf for p, leaf in leaves(expected[name]) if isinstance(leaf, torch.Tensor)}
            found = {target.picks: session.values[target.name] for target in _targets(records[name])}
            if oracle.keys() != found.keys() or not all(_same(found[p], oracle[p]) for p in oracle):
                wrong.append(name)
    return f"{len(wrong)} nodes differ: {wrong[:5]}" if wrong else ""


def _compare_output(model: nn.Module, traced: TracedGraph, inputs: torch.Tensor) -> str:
    """Return whether what the model returns differs from the nodes that it comes from, empty if not."""
    names = {node: name for name, node in traced.nodes.items()}
    sources = [names[node] for node in traced.graph.output_node().all_input_nodes if node in names]
    session = NodeSession(traced, [Target(name, name, 0, kind="fx") for name in sources])
    with torch.inference_mode():
        returned = [tensor for _, tensor in leaves(model(inputs.clone()))]
        session.run(model, [inputs.clone()])
    found = [session.values[name] for name in sources]
    is_same = len(found) == len(returned) and all(map(_same, found, returned))
    return "" if is_same else f"the output differs from {sources}"


def _batches(records: dict[str, ModuleRecord]) -> Iterator[list[str]]:
    """Yield the nodes that have tensors, as many at a time as `BATCH_BYTES` allows.

    A node that is named as a container of others is asked for alone: torchvision confuses the two.
    """
    around = {name.rpartition(".")[0] for name in records}
    names: list[str] = []
    byte_count = 0
    for name in (name for name, record in records.items() if _targets(record)):
        if name in around:
            yield [name]
            continue
        own = sum(leaf.byte_count for leaf in records[name].calls[0].outputs)
        if names and byte_count + own > BATCH_BYTES:
            yield names
            names, byte_count = [], 0
        names.append(name)
        byte_count += own
    if names:
        yield names


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    is_nan = found.isnan() & expected.isnan()
    return found.dtype == expected.dtype and bool(((found == expected) | is_nan).all())


def _targets(record: ModuleRecord) -> list[Target]:
    return [
        Target(f"{record.path}{leaf.picks}", record.path, 0, "out", leaf.picks, leaf.is_overwritten, "fx")
        for leaf in record.calls[0].outputs
        if leaf.shape is not None
    ]


def _refused(model: nn.Module, error: ServiceError) -> str:
    if error.reason is not ErrorReason.NOT_TRACEABLE:
        return f"FAILED {error.reason}: {error}"
    try:
        node_names(model)
    except Exception:  # noqa: BLE001 - whatever the model raises
        return f"NOT_TRACEABLE {error}"
    return f"FAILED torchvision can trace it: {error}"


def _build(name: str) -> nn.Module:
    family = get_model_builder(name).__module__
    settings = dict(_first(SETTINGS, name, {}))
    if ".detection" in family or ".segmentation" in family:
        settings["weights_backbone"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GoogLeNet and Inception warn of their initialisation
        model: nn.Module = get_model(name, weights=None, **settings)
    return model.eval()


def _first(table: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for prefix, value in table.items() if name.startswith(prefix)), default)


if __name__ == "__main__":
    sys.exit(main())
