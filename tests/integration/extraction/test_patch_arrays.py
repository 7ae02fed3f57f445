"""Models whose processors make patches, on these patches as arrays: Qwen-VL, Idefics 3 and Pix2Struct."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

import trocar
from tests.support.models.transformers_folders import images_of, loaded_by_transformers
from tests.support.servers.running_server import RunningServer, running_server

LOGITS = '/out["logits"]'
BLOCKS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**BLOCKS, "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 30}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
PATCHES = {"patch_size": 4, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
SIZES = [(30, 47), (20, 20)]
IMAGE, START, END = 5, 3, 4


def _qwen(config: Any, **vision: Any) -> Any:
    text = {
        **TEXT,
        "rope_parameters": ROPE,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config(text_config=text, vision_config={"num_heads": 2, **PATCHES, **vision}, **IDS)


KINDS: dict[str, tuple[Any, Any]] = {
    "qwen2": (
        T.Qwen2VLForConditionalGeneration,
        lambda: _qwen(T.Qwen2VLConfig, depth=2, embed_dim=16, hidden_size=16, mlp_ratio=2),
    ),
    "qwen25": (
        T.Qwen2_5_VLForConditionalGeneration,
        lambda: _qwen(
            T.Qwen2_5_VLConfig,
            depth=2,
            hidden_size=16,
            intermediate_size=16,
            out_hidden_size=16,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
    ),
    "idefics3": (
        T.Idefics3ForConditionalGeneration,
        lambda: T.Idefics3Config(
            vision_config={**BLOCKS, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4},
            text_config=T.LlamaConfig(**TEXT, pad_token_id=0),
            image_token_id=IMAGE,
            scale_factor=2,
            pad_token_id=0,
        ),
    ),
    "pix2struct": (
        T.Pix2StructForConditionalGeneration,
        lambda: T.Pix2StructConfig(
            text_config={
                "vocab_size": 30,
                "hidden_size": 16,
                "d_kv": 8,
                "d_ff": 16,
                "num_layers": 2,
                "num_heads": 2,
            },
            vision_config={
                "hidden_size": 16,
                "patch_embed_hidden_size": 48,
                "d_ff": 16,
                "d_kv": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "seq_len": 20,
            },
        ),
    ),
}


def _qwen_inputs() -> dict[str, torch.Tensor]:
    size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
    processor: Any = T.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    made = processor(images_of(SIZES), return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
    rows = [[7, START, *[IMAGE] * count, END, 8] for count in counts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    types = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types, **made}


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if name.startswith("qwen"):
        return _qwen_inputs()
    if name == "pix2struct":
        processor: Any = T.Pix2StructImageProcessorPil(patch_size={"height": 4, "width": 4}, max_patches=20)
        made = processor(images_of(SIZES), return_tensors="pt")
        return {**made, "decoder_input_ids": torch.tensor([[0, 3], [0, 4]])}
    ids = torch.tensor([[7, IMAGE, IMAGE, 8]] * 2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(2, 2, 3, 8, 8),
        "pixel_attention_mask": torch.ones(2, 2, 8, 8, dtype=torch.int64),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("patches")
    for name, (kind, make) in KINDS.items():
        torch.manual_seed(0)
        kind(make()).save_pretrained(root / name)
    return {name: root / name for name in KINDS}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    models: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.mark.parametrize("name", KINDS)
def test_patches_as_arrays_give_what_transformers_gives(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    inputs = inputs_of(name)
    model = loaded_by_transformers(KINDS[name][0], folders[name])
    with torch.inference_mode():
        wanted = model(**inputs).logits.numpy()
    arrays = {key: value.numpy() for key, value in inputs.items()}
    np.testing.assert_array_equal(client.extract(name, arrays, [LOGITS])[LOGITS], wanted)


def test_images_are_refused_with_the_arrays_to_send(client: trocar.Client) -> None:
    inputs: dict[str, Any] = {"input_ids": np.array([[7, 3, 5, 4]]), "images": images_of(SIZES)[:1]}
    with pytest.raises(
        trocar.errors.NoPreprocessingError, match=r"send the arrays pixel_values: .*; image_grid_thw"
    ):
        client.extract("qwen2", inputs, [LOGITS])
