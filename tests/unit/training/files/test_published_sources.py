"""Published models of another library: recorded and rebuilt with their source and named inputs."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.models.transformers_folders import save_family
from trocar_server.models import load_model, parse_model_argument
from trocar_server.training.files.published_records import PublishedModel, describe_base, model_spec

CPU = torch.device("cpu")


def test_a_model_of_a_folder_is_rebuilt_from_it_with_its_own_weights(tmp_path: Path) -> None:
    save_family("bert", tmp_path / "bert")
    base = load_model(parse_model_argument(f"mini=hf:{tmp_path / 'bert'}"), CPU, tmp_path / "cache")
    tuned = {name: value + 1 for name, value in base.module.state_dict().items()}
    file = tmp_path / "tuned.safetensors"
    save_file(tuned, file)
    record = PublishedModel(
        model_id="tuned",
        principal="me",
        created_at_s=0.0,
        base_model_id="mini",
        base=describe_base(base),
        heads=(),
        categories=(),
        weights_file=file.name,
        byte_count=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    rebuilt = load_model(model_spec(record, file, lambda *_: ""), CPU, tmp_path / "cache")
    assert rebuilt.signature == base.signature
    assert rebuilt.stages == base.stages
    state = rebuilt.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in tuned.items())
