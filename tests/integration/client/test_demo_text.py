"""`trocar demo text` in a process of its own, compared with sentence-transformers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.support.models.text_models import minilm_folder
from tests.support.wire.pictures import colour_count
from trocar._cli.demo.text import LAST_LAYER, RESULTS, SENTENCES, VECTORS, contributions, nearest


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "trocar", "demo", "text", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_vectors_are_those_of_sentence_transformers(demo: tuple[str, Path]) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = load_file(demo[1] / "sentences.safetensors")[VECTORS]
    own = SentenceTransformer(str(minilm_folder()), device="cpu").encode(list(SENTENCES))
    np.testing.assert_allclose(vectors, own, atol=1e-6)


def test_sentences_that_mean_the_same_are_nearest(demo: tuple[str, Path]) -> None:
    vectors = load_file(demo[1] / "sentences.safetensors")[VECTORS]
    assert nearest(vectors @ vectors.T) == [1, 0, 3, 2, 5, 4]
    assert "A kitten is napping on the couch.         0.74" in demo[0]


def test_what_tokens_add_is_the_cosine(demo: tuple[str, Path]) -> None:
    maps = load_file(demo[1] / "sentences.safetensors")
    vectors = maps[VECTORS]
    lengths = [
        len(ids) for ids in AutoTokenizer.from_pretrained(str(minilm_folder()))(list(SENTENCES))["input_ids"]
    ]
    states = [row[:length] for row, length in zip(maps[LAST_LAYER], lengths, strict=True)]
    sums = [float(row.sum()) for row in contributions(states, vectors[[1, 0, 3, 2, 5, 4]])]
    np.testing.assert_allclose(
        sums, np.repeat([vectors[i] @ vectors[i + 1] for i in (0, 2, 4)], 2), atol=1e-5
    )


def test_pictures_have_something_on_them(demo: tuple[str, Path]) -> None:
    for name in ("similarities.png", "tokens.png"):
        with Image.open(demo[1] / name) as picture:
            assert picture.width > 700
            assert colour_count(picture) > 300


def test_it_says_what_it_wrote(demo: tuple[str, Path]) -> None:
    assert all(f"{demo[1] / name}  " in demo[0] for name in RESULTS)
