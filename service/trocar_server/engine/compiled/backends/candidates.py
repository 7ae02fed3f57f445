"""Candidate backends for a compiled pass, in the order in which they are tried."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.graph_runner import GraphRunner, Pass, PlainPass
from trocar_server.engine.compiled.backends.graphs import GraphApi
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner, is_installed
from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.request.numerics import Numerics


class Runner(Protocol):
    """A compiled pass. Runs on the owner thread, one pass at a time."""

    engine: str
    """The backend: `openvino`, `torch` or `cuda-graph`."""
    numerics: Numerics
    """The numerics of its values."""

    def run(
        self, arguments: Sequence[torch.Tensor], lent: Collection[str] = ()
    ) -> Mapping[str, torch.Tensor]:
        """Run one pass; the values belong to the caller, keyed by the names of the recipe's targets.

        Args:
            arguments: As the recipe says; the tensors of its edits come last.
            lent: The names of values that nobody reads once the next pass runs: they need no copy.
        """
        ...


@dataclass(frozen=True)
class Candidate:
    """A runner that can be built.

    Attributes:
        make: Builds it.
        calls_torch: Whether `make` must run on the owner thread; otherwise it must run on another.
        engine: The backend of the runner.
        numerics: The numerics of its values.
    """

    make: Callable[[], Runner]
    calls_torch: bool
    engine: str
    numerics: Numerics


def candidates(
    recipe: Recipe,
    numerics: Numerics,
    built: Built,
    folder: Path,
    copy_tree: Callable[[], nn.Module],
    thread_count: int | None,
    graphs: GraphApi | None = None,
) -> Iterator[Candidate]:
    """Yield candidates for a recipe, loosest numerics first, unmodified torch last.

    For `EXACT` there is one at most: the recorded eager pass.

    Args:
        recipe: The values wanted.
        numerics: The loosest that the caller accepts.
        built: The result of the build process.
        folder: Folder of the built files.
        copy_tree: Copies the model's module tree.
        thread_count: Threads of one pass; None for the backend's own choice.
        graphs: Records passes, where the device can replay them.
    """
    if numerics is Numerics.EXACT:
        if graphs is not None:
            yield _recorded(_plain(copy_tree, recipe, numerics), graphs, numerics)
        return
    for taken in (Numerics.BF16, Numerics.FAST):
        if taken is Numerics.BF16 and numerics is not Numerics.BF16:
            continue
        if built.has_graph:
            make_graph = _openvino(folder, recipe, taken, thread_count)
            yield Candidate(make_graph, calls_torch=False, engine=OpenVinoRunner.engine, numerics=taken)
        make = _torch(copy_tree, recipe, built, taken)
        if graphs is not None:
            yield _recorded(make, graphs, taken)
            if taken is Numerics.FAST:
                # Where eager computes in TF32, folded weights are further from it than `FAST` allows.
                yield _recorded(_plain(copy_tree, recipe, taken), graphs, taken)
        yield Candidate(make, calls_torch=True, engine=TorchRunner.engine, numerics=taken)


def has_openvino(device: torch.device) -> bool:
    """Whether OpenVINO can run the models of a device."""
    return device.type == "cpu" and is_installed()


def _openvino(folder: Path, recipe: Recipe, numerics: Numerics, threads: int | None) -> Callable[[], Runner]:
    return lambda: OpenVinoRunner(folder, recipe, numerics, threads)


def _torch(
    copy_tree: Callable[[], nn.Module], recipe: Recipe, built: Built, numerics: Numerics
) -> Callable[[], TorchRunner]:
    return lambda: TorchRunner(copy_tree(), recipe, built.pairs, numerics)


def _plain(copy_tree: Callable[[], nn.Module], recipe: Recipe, numerics: Numerics) -> Callable[[], PlainPass]:
    return lambda: PlainPass(copy_tree(), recipe, numerics)


def _recorded(make: Callable[[], Pass], graphs: GraphApi, numerics: Numerics) -> Candidate:
    return Candidate(lambda: GraphRunner(make(), graphs), True, GraphRunner.engine, numerics)
