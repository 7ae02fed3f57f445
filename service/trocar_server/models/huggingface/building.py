"""transformers' models, built from a checked folder: by the class that its configuration names, or by task.

    module = build(open_folder(path), "", {}, torch.bfloat16, weights=True)

transformers is imported here and nowhere else in the server, late: it takes seconds.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.late_imports import late_imports
from trocar_server.models.huggingface.folder import ModelFolder, check_configuration, check_weights
from trocar_server.models.huggingface.pooling import add_pooling
from trocar_server.models.huggingface.quiet import quietly
from trocar_server.models.source import invalid

TASKS = {
    "audio-classification": "AutoModelForAudioClassification",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
    "depth-estimation": "AutoModelForDepthEstimation",
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "image-segmentation": "AutoModelForSemanticSegmentation",
    "image-text-to-text": "AutoModelForImageTextToText",
    "multiple-choice": "AutoModelForMultipleChoice",
    "object-detection": "AutoModelForObjectDetection",
    "question-answering": "AutoModelForQuestionAnswering",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "token-classification": "AutoModelForTokenClassification",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
}
"""transformers' class for each task, under the Hub's names of tasks."""

_LOADING = {"local_files_only": True, "trust_remote_code": False, "return_unused_kwargs": True}
_NOT_OPTIONS = frozenset(
    (
        *_LOADING,
        *("revision", "code_revision", "token", "cache_dir", "force_download", "proxies"),
        *("subfolder", "gguf_file"),
    )
)
"""Arguments of transformers' loader, not entries of a configuration; others of these begin with `_`."""
_LISTED_COUNT = 10
_HALVES = (torch.float16, torch.bfloat16)


def import_code(folder: ModelFolder, task: str) -> None:
    """Import transformers, and the code of the class that `build` will most likely choose.

    Args:
        folder: The checked folder.
        task: As in `build`.
    """
    own = folder.config.get("architectures")
    names = (task, TASKS.get(task, "AutoModel"), *(own[:1] if isinstance(own, list) else ()))
    with late_imports:
        import transformers

        for name in names:  # transformers imports the code of a class when it is named
            getattr(transformers, str(name), None)


def build(
    folder: ModelFolder,
    task: str,
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    weights: bool,
    names: Collection[str] | None = None,
) -> nn.Module:
    """Build a model, with the folder's weights or with initial ones.

    Initial values are what `torch.manual_seed` and the class's own constructor give.

    Args:
        folder: The checked folder.
        task: A key of `TASKS` or the name of a class; empty for the configuration's `architectures`.
        options: Entries of the configuration to replace.
        dtype: Of the weights; as the folder says when None (float32 for initial ones).
        weights: Whether to load the folder's.
        names: Of the tensors that will replace the initial values: a pooling layer that has none of them is
            left out. None where the values stay.

    Raises:
        ServiceError: `MODEL_INVALID`, an option that the configuration does not have among others;
            `WEIGHTS_MISMATCH`, the file lacks parameters of this class.
    """
    if weights:
        check_weights(folder)
    with quietly():
        import transformers

        config = _configuration(transformers, folder, options)
        chosen = _class_for(transformers, folder, task, config)
        config = _own_config(chosen, config)
        if weights:
            module = _loaded(chosen, folder.path, config, dtype)
        else:
            initial = partial(_initial, chosen, config, dtype or torch.float32)
            module = initial()
            if names is not None and _lack_pooler(names, module):
                module = initial(add_pooling_layer=False)
        if chosen is transformers.AutoModel or not task:
            add_pooling(module, folder, weights)
    # Keys and values for later tokens: no pass of ours continues another.
    _without_cache(module)
    return module


def _configuration(transformers: Any, folder: ModelFolder, options: Mapping[str, Any]) -> Any:
    """Read a folder's configuration and replace entries; transformers would drop those that it does not know.

    Raises:
        ServiceError: `MODEL_INVALID`, there is no such entry, or it would import code.
    """
    _check_options(options)
    load = partial(transformers.AutoConfig.from_pretrained, folder.path, **_LOADING)
    config, unused = load(**options)
    for name in sorted(options.keys() & unused.keys()):
        raise _no_option(config, "", name, options[name])
    parts = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    before = load()[0] if parts else None  # the part that is made of a mapping has whatever was in it
    for part, entries in parts.items():
        own = getattr(before, part, None)
        for name in sorted(entries) if hasattr(own, "model_type") else ():
            if not hasattr(own, name):
                raise _no_option(own, f"{part}.", name, entries[name])
    return config


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is for transformers' loader, and what no folder may have; see Note: [No remote code]."""
    for name in options:
        if name in _NOT_OPTIONS or name.startswith("_"):
            raise invalid(f"'{name}' is no entry of config.json, so `options` cannot have it; leave it out")
    check_configuration("options", dict(options))


def _no_option(config: Any, prefix: str, name: str, value: Any) -> ServiceError:
    """Error for an entry that a configuration lacks; a part may have it, as CLIP's `vision_config`."""
    parts = [part for part in config.sub_configs if hasattr(getattr(config, part, None), name)]
    examples = [repr({part: {name: value}}) for part in parts]
    hints = nearest(name, [*config.to_dict(), *config.attribute_map, "num_labels"])
    rest = f"nearest: {', '.join(prefix + hint for hint in hints)}" if hints else "config.json lists them"
    if examples:
        rest = f"write {' or '.join(examples)}"
    return invalid(f"{type(config).__name__} has no option '{prefix}{name}'; {rest}")


def _class_for(transformers: Any, folder: ModelFolder, task: str, config: Any) -> Any:
    """Return transformers' class: of a task, of a name, or of the configuration."""
    if task in TASKS:
        return getattr(transformers, TASKS[task])
    names = [task] if task else config.architectures or []
    if folder.modules and not task:
        names = _encoder(transformers, config, names)
    if not names:
        return transformers.AutoModel
    chosen = getattr(transformers, str(names[0]), None)
    if isinstance(chosen, type) and issubclass(chosen, transformers.PreTrainedModel):
        return chosen
    raise invalid(
        f"'{folder.path.name}': transformers {transformers.__version__} has no model '{str(names[0])[:80]}'; "
        f"name a class, or a task after '#': {', '.join(TASKS)}"
    )


def _encoder(transformers: Any, config: Any, names: list[str]) -> list[str]:
    """Class of a sentence model, if not AutoModel's: as sentence-transformers 6, without heads or decoders.

    The configuration names what the base was trained as, such as `BertForMaskedLM`, whose output is logits.
    """
    if names and str(names[0]).endswith("EncoderModel"):
        return names
    encoder = f"{type(config).__name__.removesuffix('Config')}EncoderModel"
    return (
        [encoder] if getattr(config, "is_encoder_decoder", False) and hasattr(transformers, encoder) else []
    )


def _own_config(chosen: Any, config: Any) -> Any:
    """Return the part of a configuration that a class takes: one tower of CLIP has that of the tower.

    Raises:
        ServiceError: `MODEL_INVALID`, the configuration has parts, and none is of this class.
    """
    own = getattr(chosen, "config_class", None)
    if own is None or isinstance(config, own):
        return config
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    if not parts:
        return config
    result = next((part for part in parts if isinstance(part, own)), None)
    if result is None:
        raise invalid(f"{chosen.__name__} takes a {own.__name__}; the folder has a {type(config).__name__}")
    return result


def _initial(chosen: Any, config: Any, dtype: torch.dtype, **arguments: Any) -> nn.Module:
    """Build a model with initial values, of the dtypes that `from_pretrained` gives to loaded ones."""
    if hasattr(chosen, "from_config"):
        module = chosen.from_config(config, dtype=dtype, trust_remote_code=False, **arguments)
    else:
        module = chosen._from_config(config, dtype=dtype, **arguments)
    # As transformers 5.23 chooses in `_get_dtype_plan`: parts of names, T5's `wo` among them.
    names = set(module._keep_in_fp32_modules_strict or ()) if dtype in _HALVES else set()
    if dtype is torch.float16:
        names |= set(module._keep_in_fp32_modules or ())
    kept = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)))
    for name, tensor in module.state_dict(keep_vars=True).items() if names else ():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    initial: nn.Module = module
    return initial


def _lack_pooler(names: Collection[str], module: nn.Module) -> bool:
    """Whether tensors are of a model that `_loaded` has built without its pooling layer."""
    given, own = (any(name.startswith("pooler.") for name in each) for each in (names, module.state_dict()))
    return own and not given and "add_pooling_layer" in inspect.signature(type(module)).parameters


def _loaded(chosen: Any, path: Path, config: Any, dtype: torch.dtype | None, **arguments: Any) -> nn.Module:
    module, report = chosen.from_pretrained(
        path,
        config=config,
        dtype=dtype or "auto",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **arguments,
    )
    missing = sorted(map(str, report["missing_keys"]))
    if missing and all(key.startswith("pooler.") for key in missing) and not arguments:
        return _loaded(chosen, path, config, dtype, add_pooling_layer=False)  # trained without one
    problems = missing + sorted(str(key) for key in report["mismatched_keys"])
    if problems:
        shown = ", ".join(problems[:_LISTED_COUNT]) + (", ..." if len(problems) > _LISTED_COUNT else "")
        raise ServiceError(
            ErrorReason.WEIGHTS_MISMATCH,
            f"'{path.name}' has no weights for {len(problems)} parameters of {type(module).__name__} "
            f"({shown}); name the task it was trained for after '#', for example #feature-extraction",
        )
    loaded: nn.Module = module
    _copy_weights(loaded)
    return loaded


def _copy_weights(module: nn.Module) -> None:
    """Copy the weights out of the file that `from_pretrained` maps: it may be written over or cut.

    The file also aligns them to 8 bytes, where torch aligns to 64, and MKL's last bits depend on it.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _without_cache(module: nn.Module) -> None:
    """Switch `use_cache` off in every configuration: T5's stacks have copies of the model's."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        nested = (getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
        for each in (config, *nested):
            if each is not None and getattr(each, "use_cache", None):
                each.use_cache = False
