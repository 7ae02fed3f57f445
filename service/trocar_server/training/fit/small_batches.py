"""Batches of one sample, which batch norms in train mode and some models do not take.

The last batch of an epoch may be one: 33 samples in batches of 8. A pass without data tells before the fit
begins what would otherwise end it after an epoch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trocar_server.engine.host.recordings import lacks_data
from trocar_server.engine.host.rejections import rejection
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import make_meta_replica
from trocar_server.training.datasets.order import padded_count
from trocar_server.training.fit.fit_data import Core, Reader
from trocar_server.training.spec.fit_spec import FitSpec


def single_sample_problems(
    core: Core, train: Reader, evaluation: Reader | None, spec: FitSpec
) -> Iterator[tuple[str, str]]:
    """Yield where a fit would run a batch of one that its model does not take, as fields and messages."""
    sizes = _sizes(len(train), spec)
    if 1 in sizes and (why := _refusal(core.module, train)):
        if sizes == {1}:
            yield "batch_size", f"the model does not take batches of one sample in training ({why}); use more"
        else:
            yield (
                "drop_last",
                "the last batch of an epoch has one sample, which the model does not take in training "
                f"({why}); set `drop_last`, or another `batch_size`",
            )
    if evaluation is None or not len(evaluation):
        return
    last = len(evaluation) % spec.batch_size or min(len(evaluation), spec.batch_size)
    if last == 1 and (why := _refusal(core.evaluated, evaluation)):
        field = "eval_split" if spec.eval_split else "eval_dataset_id"
        yield field, f"the last batch has one sample, which the model does not take ({why}); leave it out"


def _sizes(count: int, spec: FitSpec) -> set[int]:
    """Return the numbers of samples of the training batches of an epoch, of one worker."""
    whole, last = divmod(padded_count(count, spec.workers), spec.batch_size)
    sizes = ([spec.batch_size] if whole else []) + ([last] if last and not spec.drop_last else [])
    return {max(1, size // spec.workers) for size in sizes}


def _refusal(module: nn.Module, reader: Reader) -> str:
    """Return why a module refuses one sample; empty if it takes it, two neither, or data is needed."""
    if len(reader) < 2 or _runs_on(module, reader, 2):
        return ""
    return _runs_on(module, reader, 1)


def _runs_on(module: nn.Module, reader: Reader, size: int) -> str:
    """Return the error of a pass without data on so many samples; empty without one."""
    batch = reader.batch(torch.arange(size))
    try:
        meta = make_meta_replica(module)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            meta(*_to_meta(batch.args), **_to_meta(batch.kwargs))
    except ServiceError:
        return ""
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        return "" if lacks_data(error) else rejection(first_line(error))
    return ""


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _to_meta(item) for name, item in value.items()}
    return type(value)(_to_meta(item) for item in value) if isinstance(value, list | tuple) else value
