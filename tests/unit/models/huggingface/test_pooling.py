"""What follows the transformer in a folder of sentence-transformers, where it is incomplete."""

import json
from pathlib import Path

import pytest
from torch import nn

from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.folder import open_folder
from trocar_server.models.huggingface.pooling import add_pooling

_DENSE = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.modules.activation.Tanh"}


def sentence_folder(folder: Path) -> Path:
    """Write the configurations of a transformer, a pooling and a dense layer."""
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, config in {"": {}, "1_Pooling": {"pooling_mode_mean_tokens": True}, "2_Dense": _DENSE}.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    return folder


def test_a_dense_layer_without_safetensors_is_named_with_the_cure(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ServiceError, match="'2_Dense' has no model"):
        add_pooling(nn.Linear(4, 4), open_folder(folder), weights=True)


def test_a_part_without_its_configuration_is_named(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ServiceError, match="cannot read 'config"):
        add_pooling(nn.Linear(4, 4), open_folder(folder), weights=True)
