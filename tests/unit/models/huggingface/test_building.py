"""Models built from folders: what they hold."""

from pathlib import Path

import torch

from tests.support.models.transformers_folders import save_family
from trocar_server.models.huggingface.building import build
from trocar_server.models.huggingface.folder import open_folder


def test_a_file_that_is_overwritten_changes_no_loaded_weight(tmp_path: Path) -> None:
    saved = save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    file = tmp_path / "model" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, tensor in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_weights_are_aligned_as_torch_allocates(tmp_path: Path) -> None:
    save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in module.parameters())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    save_family("gpt2", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    tied = module.get_parameter("lm_head.weight"), module.get_parameter("transformer.wte.weight")
    assert tied[0].data_ptr() == tied[1].data_ptr()
