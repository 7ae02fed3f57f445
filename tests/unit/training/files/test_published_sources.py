"""Published models of another library: recorded and rebuilt with their source and named inputs."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import save_file

from tests.support.models.transformers_folders import save_family
from trocar_server.models import HostedModel, ModelSpec, load_model, parse_model_argument
from trocar_server.models.spec import Merge
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
    assert describe_base(base).source == f"hf:{tmp_path / 'bert'}#feature-extraction"


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
    assert describe_base(hosted).dtype == "fp16"


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


def test_a_record_of_an_earlier_version_names_no_processor(tmp_path: Path) -> None:
    save_family("bert", tmp_path / "bert")
    base = load_model(parse_model_argument(f"mini=hf:{tmp_path / 'bert'}"), CPU, tmp_path / "cache")
    kept = _record(base, tmp_path / "tuned.safetensors").model_dump()
    del kept["base"]["processor"]
    record = PublishedModel.model_validate(kept)
    assert model_spec(record, Path("unused"), lambda *_: "").processor_folder is None


@pytest.mark.parametrize("merge", Merge)
def test_a_published_model_is_merged_as_its_base(tmp_path: Path, merge: Merge) -> None:
    base = load_model(
        ModelSpec("net", FACTORY, "random:0", input_shape=(3, 8, 8), merge=merge), CPU, tmp_path
    )
    record = _record(base, tmp_path / "tuned.safetensors")
    again = PublishedModel.model_validate_json(record.model_dump_json())
    assert model_spec(again, Path("unused"), lambda *_: "").merge is merge


def test_a_record_without_a_word_on_merging_merges_nobody(tmp_path: Path) -> None:
    base = load_model(ModelSpec("net", FACTORY, "random:0", input_shape=(3, 8, 8)), CPU, tmp_path)
    kept = _record(base, tmp_path / "tuned.safetensors").model_dump()
    del kept["base"]["merge"]
    record = PublishedModel.model_validate(kept)
    assert model_spec(record, Path("unused"), lambda *_: "").merge is Merge.OFF
