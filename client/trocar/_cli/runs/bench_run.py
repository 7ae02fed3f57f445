"""Run of `trocar bench`, after its options are parsed."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console

import trocar
from trocar import Client, FeatureMaps, Model
from trocar._base.call_options import CallOptions, Numerics
from trocar._bench.case import Case, Result, Settings
from trocar._bench.load import processor_count
from trocar._bench.local_passes import Local, LocalJob
from trocar._bench.run import run_case
from trocar._bench.served import Served
from trocar._bench.text import case_text
from trocar._cli.failures import refuse
from trocar.errors import ModelNotLoadedError


@dataclass(frozen=True)
class Inputs:
    """Inputs of every call."""

    images: tuple[Path, ...] = ()
    """Images to send; random numbers where there are none."""
    shape: tuple[int, ...] | None = None
    """Of one random sample; the model's own when None."""
    seed: int = 0
    """Of random numbers."""
    cache: bool = False
    """Whether the server's feature cache may answer."""
    merge: bool = True
    """Whether the server may run batches of several calls together."""


def run_cases(
    client: Client, cases: Sequence[Case], inputs: Inputs, settings: Settings, *, local: bool
) -> list[Result]:
    """Measure all cases; the terminal shows the present one.

    Raises:
        TrocarError: A call fails.
        typer.BadParameter: A case has no local baseline here.
    """
    results: list[Result] = []
    capacities: dict[Case, float | None] = {}
    with ExitStack() as stack:
        here = stack.enter_context(Local()) if local else None
        tell = stack.enter_context(_status())
        for index, case in enumerate(cases, 1):
            say = partial(_say, tell, f"{index} of {len(cases)}: {case_text(case)}")
            say("first call")
            model = _loaded(client, case.model_id)
            target = _target(client, model, case, inputs)
            maps = target.extract(client, target.batches(0)[0])
            job = _local_job(client, model, target, maps) if here else None
            group = replace(case, rate=None)
            results.append(run_case(case, target, settings, here, job, say, capacities.get(group)))
            capacities[group] = results[-1].capacity_per_s
    return results


def report(client: Client, results: Sequence[Result], settings: Settings) -> dict[str, Any]:
    """Return all measurements, their environment and settings."""
    info = client.server_info()
    return {
        "server": {"version": info.version, "torch_version": info.torch_version, "device": info.device},
        "client": {
            "version": trocar.__version__,
            "python_version": platform.python_version(),
            "platform": platform.platform(),
            "processor_count": processor_count(),
        },
        "settings": asdict(settings),
        "results": [asdict(result) for result in results],
    }


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on the terminal, in place of the previous one; no-op on a pipe."""
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update


def _say(tell: Callable[[str], None], name: str, text: str) -> None:
    tell(f"{name}: {text}")


def _loaded(client: Client, model_id: str) -> Model:
    model = client.model(model_id)
    if not model.is_loaded:
        raise ModelNotLoadedError(
            f"model '{model_id}' is {model.state}; load it first: trocar admin load {model_id}"
        )
    return model


def _target(client: Client, model: Model, case: Case, inputs: Inputs) -> Served:
    how = CallOptions(cast("Numerics | None", case.numerics), inputs.merge, inputs.cache)
    return Served(
        client._connection.options,
        case.model_id,
        case.taps,
        case.batch,
        inputs.shape or model.input_shape,
        inputs.images,
        (("options", how),),
        inputs.seed,
    )


def _local_job(client: Client, model: Model, target: Served, maps: FeatureMaps) -> LocalJob:
    """Return the same passes for the local baseline.

    Raises:
        typer.BadParameter: There are none.
    """
    if ":" in model.architecture:
        refuse(f"--local: '{model.model_id}' is {model.architecture}, which only the server can build")
    others = [name for name, info in maps.info.items() if info.port != "out"]
    if others:
        refuse(f"--local: {others[0]!r} is not a module's output, which is all that torchvision collects")
    paths = tuple(dict.fromkeys(info.path for info in maps.info.values()))
    shape = (target.batch, *target.input_shape)
    return LocalJob(model.architecture, paths, shape, 0, device=client.server_info().device)
