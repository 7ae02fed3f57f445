"""Model loading: from a spec to a model in memory.

hosted = load_model(parse_model_argument("resnet18=random:0"), torch.device("cpu"), data_dir)
hosted.module(*hosted.example_inputs())
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import WeightsEnum

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.forward_signature import signature_of
from trocar_server.late_imports import late_imports
from trocar_server.models.architectures import check_spec, named_weights, weights_label
from trocar_server.models.building import BuiltModule, build
from trocar_server.models.families import Family, family_of
from trocar_server.models.from_source import TORCH_DTYPES, SourceFacts, is_of_transformers, source_facts
from trocar_server.models.hosted import HostedModel, count_bytes
from trocar_server.models.inputs import BATCH, InputSignature, overridden
from trocar_server.models.preprocessing import Preprocessor, SpecTransform
from trocar_server.models.spec import DEFAULT_WEIGHTS, ModelSpec, PreprocessingSpec

_FALLBACK_SIDE = 224
_MIN_FRAMES = 16
_FLOW_SIDE = 128  # RAFT: a multiple of 8, and at least 16 after its stride of 8


def load_model(spec: ModelSpec, device: torch.device, data_dir: Path) -> HostedModel:
    """Build a model, fill in its weights and move it to the device, ready for passes.

    torchvision's weights are downloaded once and kept in `data_dir` as safetensors (see `downloads`).
    A factory's own weights are used as it built them when `weights` is `DEFAULT`. Calls torch and
    changes torchvision for a moment: owner thread only.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE`, `UNKNOWN_WEIGHTS`, `WEIGHTS_UNAVAILABLE`,
            `WEIGHTS_CORRUPT`, `WEIGHTS_MISMATCH`, `MODEL_INVALID` or `OUT_OF_MEMORY`.
    """
    check_spec(spec)
    try:
        with late_imports:  # a library may import torch's compiler
            built = build(spec, data_dir)
        # transformers has converted already, and keeps in float32 what needs it, such as rotary frequencies.
        dtype = None if spec.source.startswith("hf:") else TORCH_DTYPES.get(spec.dtype)
        built.module.eval().requires_grad_(False).to(device, dtype)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ServiceError(
            ErrorReason.OUT_OF_MEMORY,
            f"model '{spec.model_id}' does not fit on {device}; unload another one first",
        ) from error
    except ValueError as error:  # torch's word for parameters that are not there before a first pass
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"model '{spec.model_id}' cannot be hosted: {str(error).splitlines()[0]}",
        ) from error
    return _describe(spec, built, device, source_facts(spec, built.module, data_dir))


def choose_input_shape(family: Family, meta: Mapping[str, Any], crop: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one example input, without its batch dimension.

    Args:
        family: The kind of task.
        meta: The weights' `meta`, for the least number of frames; empty when there are no weights.
        crop: What the preprocessing crops to, (height, width); empty when it does not crop.
    """
    if family is Family.OPTICAL_FLOW:
        return (3, _FLOW_SIDE, _FLOW_SIDE)
    sides = crop or (_FALLBACK_SIDE, _FALLBACK_SIDE)
    if family is Family.VIDEO:
        return (3, max(_MIN_FRAMES, meta.get("min_temporal_size", 1)), *sides)
    return (3, *sides)


def typical_weights(architecture: str, module: nn.Module) -> WeightsEnum | None:
    """Return the weights whose preprocessing suits a module that does not hold any of them.

    `DEFAULT`, unless the module was built for another image size than those: `vit_h_14` takes 224
    pixels on its own and 518 with its default weights (torchvision 0.29).
    """
    members = named_weights(architecture)
    side = getattr(module, "image_size", None)
    fitting = (m for m in members.values() if side is None or _crop_of(m) in ((), (side, side)))
    return next(fitting, members.get(DEFAULT_WEIGHTS))


def _describe(spec: ModelSpec, built: BuiltModule, device: torch.device, facts: SourceFacts) -> HostedModel:
    module, family = built.module, family_of(spec.architecture)
    reference = built.weights or (None if spec.is_custom else typical_weights(spec.architecture, module))
    preprocessing = _preprocessor(spec, family, reference, facts.preprocessing)
    signature = _signature(spec, module, facts.signature)
    crop = preprocessing.describe().crop if preprocessing else _crop_of(reference)
    shape = spec.input_shape or choose_input_shape(family, reference.meta if reference else {}, crop)
    floating = _floating_dtype(module)
    return HostedModel(
        spec=spec,
        module=module,
        family=family,
        weights=built.weights.name if built.weights and spec.rebuilding is None else weights_label(spec),
        categories=_categories(spec, built.weights) or (facts.categories if spec.categories is None else ()),
        preprocessing=preprocessing,
        input_shape=_first_shape(signature) if signature else shape,
        parameter_count=sum(parameter.numel() for parameter in module.parameters()),
        byte_count=count_bytes(chain(module.parameters(), module.buffers())),
        device=next((tensor.device for tensor in chain(module.parameters(), module.buffers())), device),
        dtype=floating and TORCH_DTYPES.get(spec.dtype, floating),  # some are kept in float32
        known_signature=signature,
        example_batch=signature.sizes.get(BATCH, 1) if signature else 1,
        stages=facts.stages,
        processor_folder=spec.processor_folder or facts.processor_folder,
        why_no_images="" if preprocessing else facts.why_no_images,
    )


def _floating_dtype(module: nn.Module) -> torch.dtype | None:
    """Dtype of the floating-point parameters: of the first one, or of most elements.

    The latter for models of transformers, which keeps some in float32 whatever the folder's dtype is:
    BLIP-2's first parameter is one.
    """
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    dtypes = counts.most_common() if is_of_transformers(module) else counts.items()
    return next((dtype for dtype, _ in dtypes), None)


def _signature(spec: ModelSpec, module: nn.Module, known: InputSignature | None) -> InputSignature | None:
    """Return the named inputs; None where only an example is known, or its shape was configured."""
    if spec.inputs:
        result = overridden(known or InputSignature((), is_complete=False), spec.inputs)
        names = [entry.name for entry in result.inputs]
        pairs = zip(result.inputs, signature_of(module).bind(names, names), strict=True)
        return replace(result, inputs=tuple(replace(entry, name=name) for entry, name in pairs))
    return None if spec.input_shape is not None else known


def _first_shape(signature: InputSignature) -> tuple[int, ...]:
    return signature.shape_of(signature.inputs[0], 1)[1:]


def _preprocessor(
    spec: ModelSpec, family: Family, weights: WeightsEnum | None, own: PreprocessingSpec | None
) -> Preprocessor | None:
    if not family.takes_images:
        return None
    if given := spec.preprocessing or own:
        return Preprocessor(SpecTransform(given), as_list=family.takes_list)
    return Preprocessor(weights.transforms(), as_list=family.takes_list) if weights else None


def _categories(spec: ModelSpec, weights: WeightsEnum | None) -> tuple[str, ...]:
    if spec.categories is not None:
        return spec.categories
    return tuple(weights.meta.get("categories", ())) if weights else ()


def _crop_of(weights: WeightsEnum | None) -> tuple[int, ...]:
    crop = tuple(getattr(weights.transforms(), "crop_size", None) or ()) if weights else ()
    return crop * 2 if len(crop) == 1 else crop
