"""A client whose server is torch in this process: the calls that attributions are made of, and no more."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

import trocar
from trocar import BatchResult, FeatureMapInfo, FeatureMaps, Model, Preprocessing, ServerTiming, Tap
from trocar._async.analysis.attributions import AsyncAttributions
from trocar._base.call_options import EXACT, CallOptions
from trocar._base.tensors import Array
from trocar._request.edits import Edit
from trocar._request.objectives import Objective
from trocar._sync.analysis.attributions import Attributions
from trocar_api.v1 import objective_pb2 as pb

PREPROCESSING = Preprocessing("halves", (), (), (0.5,) * 3, (0.25,) * 3, "bilinear")


def preprocessed(images: Sequence[Any]) -> Array:
    """(batch, 3, height, width) of PIL images of one size."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images]).astype(np.float32) / 255
    return ((np.moveaxis(pixels, -1, 1) - 0.5) / 0.25).astype(np.float32)


class TorchClient:
    """Hosts modules; selectors are `/in`, `/out`, `path`, `path/in`, their gradients, and `**:Type`."""

    part: Any = Attributions
    attribute: Any = trocar.Client.attribute
    grad_cam: Any = trocar.Client.grad_cam

    def __init__(self, models: Mapping[str, nn.Module], categories: Sequence[str] = ()) -> None:
        self.models = models
        self.categories = tuple(categories)
        self.batch_sizes: list[int] = []
        """Of every pass."""
        this: Any = self
        self._attributions: Any = self.part(this, this)

    def model(self, model_id: str) -> Model:
        return Model(
            model_id, "loaded", "custom", "", "", 0, 0, "cpu", "float32", PREPROCESSING, self.categories, ()
        )

    def extract(
        self,
        model_id: str,
        inputs: Any,
        taps: Sequence[Tap],
        *,
        edits: Sequence[Edit] = (),
        of: Objective | None = None,
        options: CallOptions | None = None,
    ) -> FeatureMaps:
        assert options == EXACT or of is not None  # a pass with gradients is exact anyway
        array = preprocessed(inputs) if isinstance(inputs, list) else inputs
        assert isinstance(array, np.ndarray)
        self.batch_sizes.append(len(array))
        values, objective = run(self.models[model_id], torch.from_numpy(array.copy()), taps, edits, of)
        return FeatureMaps(
            {tap.alias or tap.selector: value for tap, value in zip(taps, values, strict=True)},
            info={
                tap.alias: FeatureMapInfo(
                    tap.alias,
                    tap.selector,
                    "",
                    0,
                    "out",
                    "",
                    value.shape,
                    "float32",
                    True,
                    **described(self.models[model_id], value.shape),
                )
                for tap, value in zip(taps, values, strict=True)
                if tap.alias
            },
            stats={},
            expansions={},
            timing=ServerTiming(0.0, 0.0),
            model_id=model_id,
            objective=objective,
        )

    def plan(self, model_id: str, inputs: Array, taps: Tap) -> Any:
        """The outputs of all calls, as the calls end."""
        assert taps.selector == "**"
        return SimpleNamespace(feature_maps=outputs(self.models[model_id], torch.from_numpy(inputs.copy())))

    def extract_stream(
        self,
        model_id: str,
        batches: Any,
        taps: Sequence[Tap],
        *,
        of: Objective | None = None,
        options: CallOptions | None = None,
    ) -> "TorchStream":
        assert options == EXACT
        return TorchStream(self, model_id, batches, taps, of)


class TorchStream:
    """The results of a stream, plain or asynchronous."""

    def __init__(
        self, client: TorchClient, model_id: str, batches: Any, taps: Sequence[Tap], of: Objective | None
    ) -> None:
        self._indices = itertools.count()
        self._results: Iterator[BatchResult] = (
            BatchResult(
                next(self._indices),
                TorchClient.extract(client, model_id, batch, taps, of=of, options=EXACT),
            )
            for batch in batches
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[BatchResult]:
        return self._results

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchResult:
        for result in self._results:
            return result
        raise StopAsyncIteration


class AsyncTorchClient(TorchClient):
    """The same for asyncio."""

    part = AsyncAttributions
    attribute = trocar.AsyncClient.attribute
    grad_cam = trocar.AsyncClient.grad_cam

    async def model(self, model_id: str) -> Model:  # type: ignore[override]
        return super().model(model_id)

    async def plan(self, model_id: str, inputs: Array, taps: Tap) -> Any:
        return super().plan(model_id, inputs, taps)

    async def extract(self, *arguments: Any, **options: Any) -> FeatureMaps:  # type: ignore[override]
        return super().extract(*arguments, **options)


def described(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a model says of the dimensions of values, by its attribute `meaning`, a function of the shape."""
    meaning: Any = getattr(model, "meaning", None)
    return {} if meaning is None else meaning(shape)


def run(
    model: nn.Module, inputs: Tensor, taps: Sequence[Tap], edits: Sequence[Edit], of: Objective | None
) -> tuple[list[Array], float | None]:
    """One pass: the value or gradient of each tap, and the objective's."""
    seen: dict[str, Tensor] = {}
    inputs.requires_grad_(inputs.is_floating_point())
    seen["/in"] = inputs
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.callback(module.register_forward_pre_hook(_recorder(seen, f"{path}/in")).remove)
                hooks.callback(module.register_forward_hook(_editor(path, module, edits)).remove)
                hooks.callback(module.register_forward_hook(_recorder(seen, path)).remove)
        seen["/out"] = model(inputs)
    value = None if of is None else objective_value(of.to_wire(), seen)
    places = [(tap.selector, tap.gradient) for tap in taps]
    wanted = [seen[place] for place, is_gradient in places if is_gradient]
    gradients = iter(torch.autograd.grad(value, wanted) if value is not None and wanted else ())
    found = [next(gradients) if is_gradient else seen[place] for place, is_gradient in places]
    offset = 0.0 if of is None else of.offset
    return [item.detach().numpy().copy() for item in found], None if value is None else value.item() + offset


def outputs(model: nn.Module, inputs: Tensor) -> dict[str, FeatureMapInfo]:
    """The output of every call of every module, the first of a tuple, as the calls end."""
    found: dict[str, FeatureMapInfo] = {}
    calls: Counter[str] = Counter()

    def note(path: str, module: nn.Module, value: object) -> None:
        pick, first = ("[0]", value[0]) if isinstance(value, tuple) else ("", value)
        if isinstance(first, Tensor):
            name, call, shape = f"{path}@{calls[path]}{pick}", calls[path], tuple(first.shape)
            found[name] = FeatureMapInfo(
                name,
                path,
                type(module).__name__,
                call,
                "out",
                pick,
                shape,
                "float32",
                False,
                **described(model, shape),
            )
        calls[path] += 1

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(lambda m, _, value, path=path: note(path, m, value))
            hooks.callback(hook.remove)
        with torch.inference_mode():
            model(inputs)
    once = {entry.path for entry in found.values() if calls[entry.path] == 1}
    named = [
        replace(entry, name=f"{entry.path}{entry.pick}") if entry.path in once else entry
        for entry in found.values()
    ]
    return {entry.name: entry for entry in named}


def objective_value(objective: pb.Objective, seen: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for term in objective.terms:
        weight = term.weight if term.HasField("weight") else 1.0
        if term.WhichOneof("kind") == "class_score":
            total = total + weight * _class_score(term.class_score, seen[term.class_score.selector or "/out"])
        else:
            value = seen[term.value_score.selector]
            total = total + weight * (
                value.norm() if term.value_score.aggregate == pb.AGGREGATE_NORM else value.sum()
            )
    return total


def _class_score(score: pb.ClassScore, value: Tensor) -> Tensor:
    rows = value if value.ndim in (2, 3) else value.movedim(1, -1)
    rows = {
        pb.CLASS_SCORE_KIND_PROBABILITY: rows.softmax(-1),
        pb.CLASS_SCORE_KIND_LOG_PROBABILITY: rows.log_softmax(-1),
    }.get(score.kind, rows).reshape(len(value), -1, rows.shape[-1])
    classes = list(score.classes) * (len(value) if len(score.classes) == 1 else 1)
    assert len(classes) == len(value), "one class, or one for each sample"
    return torch.stack([row[:, k].sum() for row, k in zip(rows, classes, strict=True)]).sum()


def _recorder(seen: dict[str, Tensor], name: str) -> Any:
    def record(module: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> Any:
        value = output[0] if output else inputs[0]
        if not isinstance(value, Tensor):
            return None
        seen[name] = value
        copy = value.clone() if value.requires_grad else value  # what follows may write in place
        return copy if output else (copy, *inputs[1:])

    return record


def _editor(path: str, module: nn.Module, edits: Sequence[Edit]) -> Any:
    def change(module: nn.Module, inputs: Any, output: Any) -> None:
        for edit in edits:
            place = edit.message.selector.removesuffix("/grad_out")
            assert edit.message.WhichOneof("operation") == "clamp"
            if place in (path, f"**:{type(module).__name__}"):
                output.register_hook(lambda gradient, low=edit.message.clamp.low: gradient.clamp(min=low))

    return change
