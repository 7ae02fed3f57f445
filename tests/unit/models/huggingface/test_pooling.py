"""What follows the transformer in a folder of sentence-transformers: its arithmetic, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5EncoderModel, T5ForConditionalGeneration

from tests.support.models.text_models import save_tokenizer
from trocar_server.errors import ServiceError
from trocar_server.models import load_model, parse_model_argument
from trocar_server.models.from_source import TORCH_DTYPES
from trocar_server.models.huggingface.folder import open_folder
from trocar_server.models.huggingface.pooling import add_pooling

_DENSE = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.modules.activation.Tanh"}


def sentence_folder(folder: Path) -> Path:
    """Write the configurations of a transformer, a pooling and a dense layer."""
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True}
    for path, config in {"": {}, "1_Pooling": pooling, "2_Dense": _DENSE}.items():
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


# --- What sentence-transformers itself computes -----------------------------------------------------------

MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
_SMALL: Any = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 30,
}
_SMALL_T5: Any = {"d_model": 4, "num_layers": 1, "num_heads": 2, "d_ff": 8, "d_kv": 2, "vocab_size": 30}
MASKS = {
    "none": [[1] * 5, [1] * 5, [1] * 5],
    "right": [[1] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "left": [[1] * 5, [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
}


class Tokens(nn.Module):
    """Stands for a transformer whose values are its inputs."""

    def forward(self, values: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, Any]:
        return {"last_hidden_state": values}


def saved(folder: Path, *modules: Any) -> Path:
    """Write a folder of sentence-transformers with these modules behind a transformer."""
    entries = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    (folder / "config.json").write_text("{}")
    for number, module in enumerate(modules, 1):
        path = folder / f"{number}_{type(module).__name__}"
        path.mkdir()
        module.save(str(path))
        kind = f"{type(module).__module__}.{type(module).__name__}"
        entries.append({"path": path.name, "type": kind})
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder


def assert_equal_to_theirs(
    folder: Path, mask: list[list[int]], *modules: Any, dtype: Any = torch.float32
) -> None:
    """Compare with the modules themselves, bit by bit."""
    tree = Tokens()
    add_pooling(tree, open_folder(saved(folder, *modules)), weights=True)
    values = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    features = {"token_embeddings": values, "attention_mask": torch.tensor(mask)}
    with torch.no_grad():
        for module in modules:
            features = module(features)
        found = tree(values, attention_mask=torch.tensor(mask))["sentence_embedding"]
    assert found.dtype == features["sentence_embedding"].dtype
    assert torch.equal(found, features["sentence_embedding"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("mode", [*MODES, ("mean", "max"), ("cls", "mean_sqrt_len_tokens", "weightedmean")])
def test_vectors_are_those_of_the_pooling_of_sentence_transformers(
    tmp_path: Path, mode: Any, padding: str, dtype: torch.dtype
) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    assert_equal_to_theirs(tmp_path, MASKS[padding], modules.Pooling(8, mode), dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
def test_older_folders_name_each_mode_by_a_key(tmp_path: Path, mode: str) -> None:
    keys = {"cls": "cls_token", "lasttoken": "lasttoken"}
    key = f"pooling_mode_{keys.get(mode, mode if mode.endswith('tokens') else mode + '_tokens')}"
    folder = sentence_folder(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({key: True, "pooling_mode_other": False}))
    tree = Tokens()
    add_pooling(tree, open_folder(folder), weights=False)
    assert tree.pooling.modes == (mode,)  # type: ignore[union-attr]


def test_a_mask_by_position_is_that_of_the_pooling(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    tree, values = Tokens(), torch.randn(3, 5, 8)
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    add_pooling(tree, open_folder(saved(tmp_path / "saved", modules.Pooling(8))), weights=True)
    mask = torch.tensor(MASKS["right"])
    expected = (values * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(tree(values, mask)["sentence_embedding"], expected)


@pytest.mark.parametrize(
    ("base", "config", "kind"),
    [
        (BertForMaskedLM, BertConfig(**_SMALL), "BertModel"),
        (T5ForConditionalGeneration, T5Config(**_SMALL_T5), "T5EncoderModel"),
        (T5EncoderModel, T5Config(**_SMALL_T5), "T5EncoderModel"),
    ],
)
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_sentence_model_has_the_class_that_sentence_transformers_takes(
    tmp_path: Path, base: Any, config: Any, kind: str, dtype: str
) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder, ids = sentence_folder(tmp_path), torch.tensor([[3, 4, 5]])
    base(config).save_pretrained(folder)
    torch.manual_seed(0)
    save_file(
        {"linear.weight": torch.randn(2, 4), "linear.bias": torch.zeros(2)},
        folder / "2_Dense" / "model.safetensors",
    )
    save_tokenizer(folder)
    asked = {"dtype": TORCH_DTYPES.get(dtype, torch.float32)}
    theirs = library.SentenceTransformer(str(folder), device="cpu", model_kwargs=asked)
    spec = replace(parse_model_argument(f"m=hf:{folder}"), dtype=dtype)
    module = load_model(spec, torch.device("cpu"), tmp_path / "cache").module
    assert type(module).__name__ == kind
    with torch.no_grad():
        wanted = theirs({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
        torch.testing.assert_close(module(ids, torch.ones_like(ids))["sentence_embedding"], wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [8, 3])
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity(), nn.GELU(), nn.ReLU(), nn.SiLU()])
@pytest.mark.parametrize("residual", [False, True])
def test_vectors_are_those_of_a_dense_layer_of_sentence_transformers(
    tmp_path: Path, residual: bool, activation: nn.Module, width: int, bias: bool
) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    torch.manual_seed(0)
    dense = modules.Dense(8, width, bias, activation, use_residual=residual)
    steps = (modules.Pooling(8), dense, modules.Normalize(), modules.Dense(width, 4))
    assert_equal_to_theirs(tmp_path, MASKS["right"], *steps)


def test_weights_that_do_not_fit_a_dense_layer_are_named(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    save_file({"linear.weight": torch.zeros(2, 4)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ServiceError, match=r"'2_Dense' do not fit .*linear\.bias"):
        add_pooling(nn.Linear(4, 4), open_folder(folder), weights=True)


@pytest.mark.parametrize("part", ["2_Dense", "3_Normalize"])
@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_a_part_for_other_values_than_the_vector_is_refused(tmp_path: Path, part: str, key: str) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    folder = saved(tmp_path, modules.Pooling(8), modules.Dense(8, 8), modules.Normalize())
    config = json.loads((folder / part / "config.json").read_text())
    (folder / part / "config.json").write_text(json.dumps({**config, key: "token_embeddings"}))
    with pytest.raises(ServiceError, match=f"'{part}' .*'token_embeddings'"):
        add_pooling(Tokens(), open_folder(folder), weights=True)
