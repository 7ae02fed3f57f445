"""Padding of texts with images, which the model's own processor does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.models import text_models
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing import image_texts

TEXTS = ["the cat sat", "the cat sat on the mat"]


class LeftProcessor:
    """A processor whose tokenizer pads on the left."""

    def __init__(self, folder: Path) -> None:
        load: Any = AutoTokenizer.from_pretrained
        self.tokenizer: Any = load(text_models.save_tokenizer(folder, padding_side="left"))
        self.image_processor = SimpleNamespace()

    def __call__(self, text: list[str], images: Any, return_tensors: str, **options: Any) -> dict[str, Any]:
        encoding = self.tokenizer(text, return_tensors=return_tensors, **options)
        return {**encoding, "pixel_values": np.zeros((len(text), 3, 2, 2), np.float32)}


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    processor = LeftProcessor(tmp_path)
    monkeypatch.setattr(image_texts, "_processor", lambda folder, version: processor)
    monkeypatch.setattr(image_texts, "_check_size", lambda *_: 0)

    def call(texts: list[str], left_padding: str) -> dict[str, Any]:
        head: dict[str, Any] = {
            "folder": "",
            "version": "",
            "entries": [["text", text] for text in texts],
            "sizes": [(2, 2)] * len(texts),
            "truncate": False,
            "add_special_tokens": True,
            "max_tokens": None,
            "model_tokens": None,
            "names": None,
            "measures": False,
            "left_padding": left_padding,
            "most_bytes": 1 << 20,
            "most_characters": 1 << 20,
        }
        return image_texts.process_image_texts(head, bytes(12 * len(texts)))

    return call


def test_padding_on_the_left_is_refused_where_a_model_would_count_it(process: Any) -> None:
    with pytest.raises(ServiceError, match=r"takes no position ids.*send texts of equal length") as refused:
        process(TEXTS, "right")
    assert refused.value.reason is ErrorReason.INPUT_REJECTED


def test_texts_of_one_length_and_single_ones_have_no_padding(process: Any) -> None:
    assert process(TEXTS[:1], "right")["pads_left"]
    assert len(process([TEXTS[0], TEXTS[0]], "right")["samples"]) == 2


@pytest.mark.parametrize("left_padding", ["positions", "nothing"])
def test_models_that_take_or_compute_positions_are_padded_as_their_processor_does(
    process: Any, left_padding: str
) -> None:
    longest = process(TEXTS[1:], left_padding)["arrays"]["input_ids"]
    assert process(TEXTS, left_padding)["padded_length"] == longest.shape[1]
