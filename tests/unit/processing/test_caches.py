"""Caches of a processing worker: models that are called in turn load their processor once."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.models.text_models import save_tokenizer
from trocar_server.processing import audio, image_texts, tokenization
from trocar_server.processing.inputs import TextOptions


def test_twenty_text_models_in_turn_load_each_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tokenizer(tmp_path)
    loads: Counter[str] = Counter()
    load: Any = AutoTokenizer.from_pretrained

    def counted(path: str, **options: Any) -> Any:
        loads[path] += 1
        return load(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    head = {
        **asdict(TextOptions()),
        "folder": str(folder),
        "names": None,
        "model_tokens": None,
        "padded_tokens": 0,
        "left_padding": "nothing",
        "most_tokens": 100,
        "most_characters": 100,
        "most_bytes": 1 << 20,
    }
    for model in (*range(20), *range(20)):
        tokenization.tokenize({**head, "version": f"model {model}"}, [("text", "the film")])
    assert loads == {str(folder): 20}


@pytest.mark.parametrize(
    "cached",
    [
        tokenization._tokenizer,
        tokenization._sentence_settings,
        audio._extractor,
        image_texts._processor,
    ],
)
def test_all_kinds_of_processors_are_cached_in_the_same_number(cached: Any) -> None:
    assert cached.cache_parameters()["maxsize"] == tokenization.MOST_CACHED >= 20
