"""Published models of another library: recorded and rebuilt with their source and named inputs."""

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import save_file

from tests.support.models.transformers_folders import save_family
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec, PreprocessingSpec, load_model, parse_model_argument
from trocar_server.models.spec import Merge, WarmVariant
from trocar_server.training.files.published_records import PublishedModel, describe_base, model_spec

CPU = torch.device("cpu")
FACTORY = "tests.unit.models.factories:Net"


def _record(base: HostedModel, file: Path) -> PublishedModel:
    content = file.read_bytes() if file.exists() else b""
    return PublishedModel(
        model_id="tuned",
        principal="me",
        created_at_s=0.0,
        base_model_id="mini",
        base=describe_base(base),
        heads=(),
        categories=(),
        weights_file=file.name,
        byte_count=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def test_a_model_of_a_folder_is_rebuilt_from_it_with_its_own_weights(tmp_path: Path) -> None:
    save_family("bert", tmp_path / "bert")
    base = load_model(parse_model_argument(f"mini=hf:{tmp_path / 'bert'}"), CPU, tmp_path / "cache")
    tuned = {name: value + 1 for name, value in base.module.state_dict().items()}
    file = tmp_path / "tuned.safetensors"
    save_file(tuned, file)
    record = _record(base, file)
    rebuilt = load_model(model_spec(record, file, lambda *_: ""), CPU, tmp_path / "cache")
    assert rebuilt.signature == base.signature
    assert rebuilt.stages == base.stages
    state = rebuilt.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in tuned.items())


def test_a_record_names_the_folder_wherever_the_next_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("bert", tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    base = load_model(parse_model_argument("mini=hf:./bert#feature-extraction"), CPU, tmp_path / "cache")
    assert describe_base(base).spec["source"] == f"hf:{tmp_path / 'bert'}#feature-extraction"


def _save_blip(folder: Path) -> None:
    blocks = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = T.Blip2Config(
        vision_config={
            **blocks,
            "hidden_size": 16,
            "intermediate_size": 32,
            "image_size": 8,
            "patch_size": 4,
        },
        qformer_config={**blocks, "hidden_size": 8, "intermediate_size": 8, "encoder_hidden_size": 16},
        text_config={
            **blocks,
            "model_type": "opt",
            "hidden_size": 16,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
        },
    )
    T.Blip2Model(config).half().save_pretrained(folder)


def test_the_dtype_of_a_folder_is_that_of_most_of_its_weights(tmp_path: Path) -> None:
    _save_blip(tmp_path / "blip")
    hosted = load_model(parse_model_argument(f"m=hf:{tmp_path / 'blip'}"), CPU, tmp_path / "cache")
    assert next(hosted.module.parameters()).dtype is torch.float32  # query_tokens: transformers keeps it so
    assert hosted.dtype is torch.float16
    assert describe_base(hosted).spec["dtype"] == "fp16"


def test_the_dtype_of_a_factorys_model_of_transformers_is_that_of_most_of_its_weights(tmp_path: Path) -> None:
    _save_blip(tmp_path / "blip")
    spec = ModelSpec("m", "local:module", factory=lambda: T.Blip2Model.from_pretrained(tmp_path / "blip"))
    hosted = load_model(spec, CPU, tmp_path / "cache")
    assert next(hosted.module.parameters()).dtype is torch.float32
    assert hosted.dtype is torch.float16


def test_a_record_names_the_configured_processor(tmp_path: Path) -> None:
    save_family("bert", tmp_path / "bert")
    spec = parse_model_argument(f"mini=hf:{tmp_path / 'bert'}")
    base = load_model(replace(spec, processor_folder=tmp_path / "tokens"), CPU, tmp_path / "cache")
    record = _record(base, tmp_path / "tuned.safetensors")
    assert model_spec(record, Path("unused"), lambda *_: "").processor_folder == tmp_path / "tokens"


@pytest.mark.parametrize("merge", Merge)
def test_a_published_model_is_merged_as_its_base(tmp_path: Path, merge: Merge) -> None:
    base = load_model(
        ModelSpec("net", FACTORY, "random:0", input_shape=(3, 8, 8), merge=merge), CPU, tmp_path
    )
    record = _record(base, tmp_path / "tuned.safetensors")
    again = PublishedModel.model_validate_json(record.model_dump_json())
    assert model_spec(again, Path("unused"), lambda *_: "").merge is merge


EVERY: dict[str, Any] = {
    "architecture": FACTORY,
    "options": {"classes": 4, "more": {"deep": [1, 2.5, None]}},
    "arguments": (3, "wide"),
    "preprocessing": PreprocessingSpec(
        resize=(9,),
        crop=(8, 8),
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 1.5, 2.0),
        interpolation="bicubic",
        rules="transformers",
        longest=20,
        scale=0.5,
        pads=True,
        patch=2,
        patches=9,
    ),
    "input_shape": (3, 8, 8),
    "stages": {"early": "first"},
    "numerics": "bf16",
    "source": "timm:other",
    "dtype": "fp32",
    "inputs": {"x": {"dtype": "float32", "shape": ("batch", 3, 8, 8), "optional": True}},
    "processor_folder": Path("/tokens"),
    "warm_variants": (WarmVariant(("first",), "bf16"),),
    "merge": Merge.EVERYBODY,
}
"""Every field that a published model has from its base, not at its default."""
OWN = {"model_id", "weights", "categories", "factory", "rebuilding"}


def test_a_published_model_has_every_field_of_its_base(tmp_path: Path) -> None:
    defaults = ModelSpec("m", "resnet18")
    assert EVERY.keys() | OWN == {each.name for each in fields(ModelSpec)}
    assert all(getattr(defaults, name) != value for name, value in EVERY.items())
    net = load_model(ModelSpec("net", FACTORY, "random:0", input_shape=(3, 8, 8)), CPU, tmp_path)
    base = replace(net, spec=ModelSpec("net", weights="random:0", **EVERY))
    record = PublishedModel.model_validate_json(
        _record(base, tmp_path / "tuned.safetensors").model_dump_json()
    )
    spec = model_spec(record, Path("unused"), lambda *_: "")
    assert {name: getattr(spec, name) for name in EVERY} == EVERY
    assert (spec.model_id, spec.weights, spec.categories) == ("tuned", "unused", ())


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It names some fields, beside what it says of the base; the oldest neither `processor` nor `merge`."""
    base = load_model(ModelSpec("net", FACTORY, "random:0", input_shape=(3, 8, 8)), CPU, tmp_path)
    kept = _record(base, tmp_path / "tuned.safetensors").model_dump()
    kept["base"] = {
        "architecture": FACTORY,
        "built_as": "",
        "options": {"a": 1},
        "arguments": [2],
        "preprocessing": {"resize": [9], "crop": [8]},
        "input_shape": [3, 8, 8],
        "stages": {"early": "first"},
    }
    oldest = model_spec(PublishedModel.model_validate(kept), Path("unused"), lambda *_: "")
    expected = ModelSpec(
        "tuned",
        FACTORY,
        "unused",
        options={"a": 1},
        arguments=(2,),
        categories=(),
        preprocessing=PreprocessingSpec(resize=(9,), crop=(8,)),
        input_shape=(3, 8, 8),
        stages={"early": "first"},
    )
    assert replace(oldest, rebuilding=None) == expected
    later = {
        "has_named_inputs": True,
        "processor": "/tokens",
        "merge": "everybody",
        "inputs": {},
        "dtype": "",
    }
    kept["base"] |= later
    newer = model_spec(PublishedModel.model_validate(kept), Path("unused"), lambda *_: "")
    assert replace(newer, rebuilding=None) == replace(
        expected, input_shape=None, processor_folder=Path("/tokens"), merge=Merge.EVERYBODY
    )


@pytest.mark.parametrize("place", ["spec", "preprocessing"])
def test_a_record_of_a_later_version_is_refused_in_words(tmp_path: Path, place: str) -> None:
    spec = ModelSpec(
        "net", FACTORY, "random:0", input_shape=(3, 8, 8), preprocessing=PreprocessingSpec(crop=(8,))
    )
    kept = _record(load_model(spec, CPU, tmp_path), tmp_path / "tuned.safetensors").model_dump()
    (kept["base"]["spec"] if place == "spec" else kept["base"]["spec"][place])["sharpness"] = 2
    with pytest.raises(ServiceError, match=f"does not know its {'sharpness' if place == 'spec' else place}"):
        model_spec(PublishedModel.model_validate(kept), Path("unused"), lambda *_: "")
