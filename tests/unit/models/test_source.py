"""Sources: how they are written, what is refused, and the extras that they need."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.transformers_folders import save_family
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import load_model, parse_model_argument
from trocar_server.models.source import Source, parse_source, require_packages

CPU = torch.device("cpu")
COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("timm:vit_tiny_patch16_224", Source("timm", "vit_tiny_patch16_224")),
        ("hf:./folder", Source("hf", "./folder")),
        ("hf:/models/folder#fill-mask", Source("hf", "/models/folder", task="fill-mask")),
        (f"hf:org/name@{COMMIT}#BertModel", Source("hf", "org/name", COMMIT, "BertModel")),
        ("torchvision:resnet50", Source("torchvision", "resnet50")),
    ],
)
def test_sources_are_read(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hf:org/name", "has no revision"),
        ("hf:org/name@main", "'main' may move"),
        ("hf:org/name@0123", "40 hex digits"),
        ("hf:folder", "is not a repository"),
        ("hf:", "is not a source"),
    ],
)
def test_what_is_not_pinned_is_refused_with_how(text: str, words: str) -> None:
    with pytest.raises(ServiceError, match=words) as error:
        parse_source(text)
    assert error.value.reason is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize(
    ("argument", "model_id", "architecture", "weights"),
    [
        ("timm:resnet18", "resnet18", "timm:resnet18", "DEFAULT"),
        ("timm:resnet18=random:3", "resnet18", "timm:resnet18", "random:3"),
        ("mini=hf:/secret/MiniLM", "mini", "hf:MiniLM", "DEFAULT"),
        ("hf:/secret/Mini LM=random:1", "mini-lm", "hf:Mini LM", "random:1"),
        ("torchvision:resnet50", "resnet50", "resnet50", "DEFAULT"),
        ("small=torchvision:resnet18=random:0", "small", "resnet18", "random:0"),
    ],
)
def test_the_command_line_names_sources(
    argument: str, model_id: str, architecture: str, weights: str
) -> None:
    spec = parse_model_argument(argument)
    assert (spec.model_id, spec.architecture, spec.weights) == (model_id, architecture, weights)


@pytest.mark.parametrize("text", ["timm:resnet18", "hf:./folder"])
def test_a_missing_extra_is_named_before_any_work(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("timm", "transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    extra = "timm" if text.startswith("timm") else "transformers"
    with pytest.raises(ServiceError, match=rf"pip install 'trocar\[{extra}\]'"):
        require_packages(parse_source(text))


def test_random_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    own = save_family("bert", tmp_path)  # built after manual_seed(0)
    (tmp_path / "model.safetensors").unlink()
    hosted = load_model(parse_model_argument(f"mini=hf:{tmp_path}=random:0"), CPU, tmp_path / "cache")
    _same_state(hosted.module, own)
    with pytest.raises(ServiceError, match="ask for `random:0`"):
        load_model(parse_model_argument(f"mini=hf:{tmp_path}"), CPU, tmp_path / "cache")


def test_a_task_or_class_is_chosen_by_name(tmp_path: Path) -> None:
    own = save_family("roberta", tmp_path)
    hosted = load_model(parse_model_argument(f"m=hf:{tmp_path}#feature-extraction"), CPU, tmp_path / "cache")
    assert type(hosted.module).__name__ == "RobertaModel"
    _same_state(hosted.module, own.roberta)  # trained without a pooling layer: hosted without one
    with pytest.raises(ServiceError) as error:
        load_model(parse_model_argument(f"m=hf:{tmp_path}#text-classification"), CPU, tmp_path / "cache")
    assert error.value.reason is ErrorReason.WEIGHTS_MISMATCH
    with pytest.raises(ServiceError, match="has no model 'NoSuchModel'"):
        load_model(parse_model_argument(f"m=hf:{tmp_path}#NoSuchModel"), CPU, tmp_path / "cache")


def test_a_relative_folder_is_found_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("bert", tmp_path / "mini")
    monkeypatch.chdir(tmp_path)
    hosted = load_model(parse_model_argument("hf:./mini"), CPU, tmp_path / "cache")
    monkeypatch.chdir("/")
    assert hosted.processor_folder is not None
    assert hosted.processor_folder.samefile(tmp_path / "mini")


def test_files_of_the_command_line_are_those_of_the_folder_where_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "#1", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    arguments = ["mini=hf:./minilm#fill-mask", "hf:./minilm=w.safetensors", "resnet18=w.safetensors"]
    named, filled, plain = (parse_model_argument(argument) for argument in arguments)
    monkeypatch.chdir(elsewhere)
    for spec in (named, filled):
        assert parse_source(spec.source).folder == here / "minilm"
        assert spec.architecture.startswith("hf:minilm")  # on the wire: no folders of the operator
    assert parse_source(named.source).task == "fill-mask"
    assert filled.weights == plain.weights == str(here / "w.safetensors")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_dtype_is_that_of_the_weights(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    save_family("bert", tmp_path)
    for argument in (f"m=hf:{tmp_path}", "timm:resnet18=random:0", "resnet18=random:0"):
        hosted = load_model(replace(parse_model_argument(argument), dtype=name), CPU, tmp_path / "cache")
        assert hosted.dtype is dtype


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [("llama", "bf16", torch.bfloat16), ("llama", "fp16", torch.float16), ("t5", "fp16", torch.float16)],
)
def test_what_transformers_keeps_in_float32_stays_so(
    tmp_path: Path, family: str, name: str, dtype: torch.dtype
) -> None:
    saved = save_family(family, tmp_path)  # rotary frequencies of Llama; `wo` of T5 in float16
    wanted = _tensors(type(saved).from_pretrained(tmp_path, dtype=dtype))
    for weights in ("", f"={tmp_path}/model.safetensors", "=random:0"):
        spec = replace(parse_model_argument(f"m=hf:{tmp_path}{weights}"), dtype=name)
        ours = _tensors(load_model(spec, CPU, tmp_path / "cache").module)
        assert {path: tensor.dtype for path, tensor in ours.items()} == {
            path: tensor.dtype for path, tensor in wanted.items()
        }
        if "random" not in weights:
            assert all(torch.equal(ours[path], wanted[path]) for path in wanted)


def _tensors(module: Any) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, also those that no state dict has."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _same_state(one: Any, other: Any) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
