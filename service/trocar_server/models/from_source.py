"""Models of other libraries: built and described, by source.

factory = source_factory(spec, cache_dir)                 # builds spec.source
facts = source_facts(spec, module, cache_dir)             # inputs, stages, preprocessing, classes
"""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trocar_server.models.huggingface.folder import ModelFolder, check_weights, open_folder
from trocar_server.models.huggingface.hub import cached_folder, download, repository_folder
from trocar_server.models.inputs import InputSignature
from trocar_server.models.source import Source, parse_source, require_packages
from trocar_server.models.spec import ModelSpec, PreprocessingSpec, WeightsKind

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch's dtype for `ModelSpec.dtype`."""
_COMMIT_SHOWN = 12


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a library says of a model that it built."""

    signature: InputSignature | None = None
    """Its named inputs; None where they are not known."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Selectors by stage name."""
    preprocessing: PreprocessingSpec | None = None
    """What to do to images; None for none."""
    categories: tuple[str, ...] = ()
    """Class names by index."""
    processor_folder: Path | None = None
    """The folder with the files of its tokenizer or other processor."""
    why_no_images: str = ""
    """What its image processor does that the preprocessing cannot do; empty where there is none."""


def check_source(spec: ModelSpec) -> None:
    """Refuse a source that cannot be built, as far as that is known without building it.

    Raises:
        ServiceError: `MODEL_INVALID` or `UNKNOWN_ARCHITECTURE`.
    """
    source = parse_source(spec.source)
    require_packages(source)
    if source.library == "timm":
        from trocar_server.models.timm_models import check_timm

        check_timm(source.name)
    elif source.folder is not None:
        folder = open_folder(source.folder)
        if spec.weights_kind is WeightsKind.NAMED:
            check_weights(folder)


def known_timm_names() -> list[str]:
    """Return timm's architectures if the library is imported already, which takes seconds; else none."""
    timm = sys.modules.get("timm")
    return [] if timm is None else list(timm.list_models())


def source_label(spec: ModelSpec) -> str:
    """Label of a source's own weights on the wire: the tag or commit, or `file` for a folder's."""
    source = parse_source(spec.source)
    if source.library == "timm":
        return source.name.partition(".")[2] or "DEFAULT"
    return source.revision[:_COMMIT_SHOWN] or "file"


def prefetch_source(spec: ModelSpec, cache_dir: Path) -> None:
    """Download what a source needs and import its library, which takes seconds. Calls no torch operator.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, with what to do instead; `MODEL_INVALID` or
            `UNKNOWN_ARCHITECTURE`, it cannot be built.
    """
    source = parse_source(spec.source)
    require_packages(source)
    if source.library == "timm":
        from trocar_server.models.timm_models import check_timm, download_timm

        check_timm(source.name)
        if spec.weights_kind is WeightsKind.NAMED:
            download_timm(source.name, cache_dir)
        return
    if source.revision:
        download(source, cache_dir)
    from trocar_server.models.huggingface.building import import_code

    import_code(_known_folder(source, cache_dir), source.task)


def source_factory(
    spec: ModelSpec, cache_dir: Path, names: Collection[str] | None = None
) -> Callable[..., nn.Module]:
    """Return what builds a source's module: with its own weights if the spec asks for these.

    Args:
        spec: The model.
        cache_dir: Where downloads are.
        names: Of the tensors of its file of weights; None for weights of another kind.

    Raises:
        ServiceError: `MODEL_INVALID`, `WEIGHTS_UNAVAILABLE` or `WEIGHTS_CORRUPT`.
    """
    source = parse_source(spec.source)
    has_weights = spec.weights_kind is WeightsKind.NAMED
    if source.library == "timm":
        from trocar_server.models.timm_models import build_timm, timm_weights

        file = timm_weights(source.name, cache_dir) if has_weights else None
        return lambda **options: build_timm(source.name, options, file)
    folder = _folder(source, cache_dir)

    def build_folder(**options: Any) -> nn.Module:
        from trocar_server.models.huggingface.building import build

        dtype = TORCH_DTYPES.get(spec.dtype)
        return build(folder, source.task, options, dtype, weights=has_weights, names=names)

    return build_folder


def source_facts(spec: ModelSpec, module: nn.Module, cache_dir: Path) -> SourceFacts:
    """Return what is known of a built module: of a source, or of a factory's model of transformers."""
    source = parse_source(spec.source) if spec.source else None
    if source is not None and source.library == "timm":
        return _timm_facts(module)
    if not is_of_transformers(module):
        return SourceFacts()
    from trocar_server.models.blocks import block_stages
    from trocar_server.models.huggingface.signatures import transformers_signature

    folder = spec.processor_folder or (_known_folder(source, cache_dir).path if source else None)
    signature = transformers_signature(module)
    preprocessing, why_no_images = _images(folder, signature)
    return SourceFacts(
        signature=signature,
        stages=block_stages(module),
        preprocessing=preprocessing,
        categories=_labels(module),
        processor_folder=folder,
        why_no_images=why_no_images,
    )


def _images(folder: Path | None, signature: InputSignature) -> tuple[PreprocessingSpec | None, str]:
    """Return the preprocessing of a folder's image processor, or what it does that cannot be done."""
    from trocar_server.models.huggingface.image_processors import (
        NotMappedError,
        has_image_settings,
        image_preprocessing,
    )

    if folder is None or not (signature.takes_images and has_image_settings(folder)):
        return None, ""
    try:
        names = [spec.name for spec in signature.inputs]
        return image_preprocessing(folder, signature.image_channels or 3, names), ""
    except NotMappedError as error:
        return None, str(error)


def _timm_facts(module: nn.Module) -> SourceFacts:
    from trocar_server.models.timm_models import (
        timm_categories,
        timm_preprocessing,
        timm_signature,
        timm_stages,
    )

    return SourceFacts(
        timm_signature(module), timm_stages(module), timm_preprocessing(module), timm_categories(module)
    )


def _folder(source: Source, cache_dir: Path) -> ModelFolder:
    return open_folder(source.folder or repository_folder(source, cache_dir))


def _known_folder(source: Source, cache_dir: Path) -> ModelFolder:
    """Return the folder of a source that is there: what is built was, or will be, verified."""
    return open_folder(source.folder or cached_folder(source, cache_dir))


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers 5, by the classes that it has; nothing is imported."""
    kinds = {
        kind.__qualname__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")
    }
    return "PreTrainedModel" in kinds and bool(getattr(module, "main_input_name", ""))


def _labels(module: Any) -> tuple[str, ...]:
    """Return a classifier's class names; empty for names that were never given."""
    names = getattr(module.config, "id2label", None) or {}
    is_head = type(module).__name__.endswith("Classification")
    given = tuple(str(names[index]) for index in sorted(names)) if is_head else ()
    return () if all(name == f"LABEL_{index}" for index, name in enumerate(given)) else given
