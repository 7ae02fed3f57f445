"""Models built from folders: what they hold."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.transformers_folders import save_family
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
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


def test_options_replace_entries_of_the_configuration_and_of_its_parts(tmp_path: Path) -> None:
    save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {"num_labels": 5}, None, weights=False)
    assert module.get_parameter("classifier.bias").shape == (5,)
    save_family("clip", tmp_path / "clip")
    options = {"vision_config": {"image_size": 16}}
    module = build(open_folder(tmp_path / "clip"), "", options, None, weights=False)
    positions = module.get_parameter("vision_model.embeddings.position_embedding.weight")
    assert positions.shape == ((16 // 4) ** 2 + 1, 8)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("deberta", {"num_label": 5}, "no option 'num_label'; nearest: num_labels"),
        ("deberta", {"zzzz": 5}, "no option 'zzzz'; config.json lists them"),
        (
            "clip",
            {"image_size": 16},
            r"no option 'image_size'; write \{'vision_config': \{'image_size': 16\}\}",
        ),
        (
            "clip",
            {"vision_config": {"image_sizes": 16}},
            "no option 'vision_config.image_sizes'; nearest: .*image_size",
        ),
    ],
)
def test_an_option_that_the_configuration_does_not_know_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], words: str
) -> None:
    save_family(family, tmp_path)
    with pytest.raises(ServiceError, match=words) as error:
        build(open_folder(tmp_path), "", options, None, weights=False)
    assert error.value.reason is ErrorReason.MODEL_INVALID
