"""Directions: stored ones as the server lists them, and one with its vectors."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trocar._base.replacement import safetensors_path, write_file
from trocar._base.tables import Columns, number_text
from trocar._result.layer_vectors import layers_of, load_layers, save_layers

if TYPE_CHECKING:
    from datetime import datetime

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_METADATA = "trocar.direction"


@dataclass(frozen=True)
class StoredDirection:
    """A direction on the server, at one place; see `Client.directions`."""

    model_id: str
    """The model."""
    name: str
    """Its name, for `trocar.readout` and edits."""
    place: str
    """Where it was fitted, the name of the feature map there."""
    kind: str
    """How: "logistic", "ridge", "mean_difference", "pca", or "given" for one from elsewhere."""
    vector_count: int
    """Number of its vectors."""
    channel_count: int
    """Their length."""
    classes: tuple[str, ...] = ()
    """The classes, in the order of the vectors; of two the vector points to the second."""
    mean_norm: float = 0.0
    """Mean Euclidean norm of the value there; 0 where not known."""
    sample_count: int = 0
    """Samples that it was fitted to."""
    score_name: str = ""
    """What the scores are: "accuracy", "r2" or "explained_variance_ratio"; empty without any."""
    score: float | None = None
    """Mean of `fold_scores`; of PCA the share of the variance."""
    fold_scores: tuple[float, ...] = ()
    """The score of each fold, on samples that its fit did not see."""
    auc: float | None = None
    """Of two classes: the mean area under the ROC curve over the folds."""
    digest: str = ""
    """SHA-256 of the direction, in hex."""
    model_digest: str = ""
    """Digest of the model that it was fitted on."""
    data_digest: str = ""
    """SHA-256 of the values and labels that it was fitted to."""
    stored_at: datetime | None = None
    """When it was stored, in UTC."""
    problem: str = ""
    """Why the server cannot read it; empty if it can."""


DIRECTION_COLUMNS: Columns[StoredDirection] = {
    "model": lambda stored: stored.model_id,
    "name": lambda stored: stored.name,
    "place": lambda stored: stored.problem or stored.place,
    "kind": lambda stored: stored.kind,
    "vectors": lambda stored: "" if stored.problem else f"{stored.vector_count} x {stored.channel_count:,}",
    "score": lambda stored: (
        "" if stored.score is None else f"{number_text(stored.score)} {stored.score_name}"
    ),
    "digest": lambda stored: stored.digest[:12],
}
"""The columns of a list of directions."""


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction with its vectors; see `Client.direction`.

    honest = client.direction("llama", "honest", at="layer[12]")
    values @ honest.vectors.T + honest.bias
    honest.save("honest.safetensors")
    """

    vectors: Floats
    """Of shape (vectors, channels), float64; for values as they are."""
    bias: Floats
    """Of shape (vectors,)."""
    about: dict[str, Any] = field(default_factory=dict)
    """What is known of it, as in the file: `kind`, `place`, `classes`, `mean_norm`, `score` and others."""

    def __post_init__(self) -> None:
        shape = self.vectors.shape
        if len(shape) != 2 or self.bias.shape != shape[:1]:
            raise ValueError(
                f"vectors of shape {shape} and bias of shape {self.bias.shape}; they are (vectors, "
                "channels) and (vectors,)"
            )

    @classmethod
    def of(cls, vector: object, bias: object = 0.0, *, mean_norm: float = 0.0) -> Direction:
        """Return a direction of your own, for `Client.store_direction`.

        Args:
            vector: Of shape (channels,) or (vectors, channels).
            bias: A number, or one for each vector.
            mean_norm: Mean norm of the value at its place, for `units="norm"`; 0 where not known.

        Raises:
            ValueError: The shapes do not fit.
        """
        vectors = np.atleast_2d(np.asarray(vector, np.float64))
        biases = np.broadcast_to(np.asarray(bias, np.float64), vectors.shape[:1]).copy()
        return cls(vectors, biases, {"kind": "given", "place": "", "mean_norm": float(mean_norm)})

    def read(self, values: object) -> Floats:
        """Return `vectors @ x + bias` of the last dimension of an array."""
        return np.asarray(values, np.float64) @ self.vectors.T + self.bias

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file; an existing one is replaced.

        Raises:
            OSError: The file cannot be written.
            ValueError: The file's name does not end in `.safetensors`.
        """
        write_file(safetensors_path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        arrays = {
            "vectors": np.ascontiguousarray(self.vectors, np.float64),
            "bias": np.ascontiguousarray(self.bias, np.float64),
        }
        return save(arrays, {_METADATA: json.dumps(self.about)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Direction:
        """Read a file that `save` has written.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It has no direction.
        """
        with open(path, "rb") as file:  # noqa: PTH123 - any path
            try:
                return cls.from_bytes(file.read())
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)} has no direction: {error}") from None

    @classmethod
    def from_bytes(cls, content: bytes) -> Direction:
        """Read the content of such a file.

        Raises:
            ValueError: It has no direction.
        """
        try:
            arrays = load(content)
            length = int.from_bytes(content[:8], "little")
            about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_METADATA])
            return cls(arrays["vectors"].astype(np.float64), arrays["bias"].astype(np.float64), dict(about))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is not as it was written ({error})") from None

    @staticmethod
    def of_layers(given: Any) -> dict[int, Direction]:
        """Return a direction for each block, of vectors by block such as steering-vectors has.

            for layer, each in Direction.of_layers(steering_vector.layer_activations).items():
                client.store_direction("llama", "polite", f"layer[{layer}]", each)

        Args:
            given: A mapping from block to vector, or an object that has one as `layer_activations`.

        Raises:
            TypeError: It is neither.
        """
        return {layer: Direction.of(vector) for layer, vector in layers_of(given).items()}

    @staticmethod
    def load_layers(path: str | os.PathLike[str]) -> dict[int, Direction]:
        """Read a GGUF file of repeng or llama.cpp: a direction for each block.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It has no vectors of blocks.
            MissingExtraError: gguf is not installed: pip install "trocar[gguf]".
        """
        return {layer: Direction.of(vector) for layer, vector in load_layers(path).items()}

    @staticmethod
    def save_layers(path: str | os.PathLike[str], layers: dict[int, Direction], model_type: str = "") -> None:
        """Write the first vector of each block to a GGUF file, for repeng and llama.cpp; without biases.

        Args:
            path: The file; its name ends in `.gguf`.
            layers: A direction for each block, by its number.
            model_type: The family, as transformers names it, for example "llama".

        Raises:
            ValueError: The name does not end in `.gguf`, or there are no layers.
            MissingExtraError: gguf is not installed: pip install "trocar[gguf]".
        """
        save_layers(path, {layer: each.vectors[0] for layer, each in layers.items()}, model_type)

    def __repr__(self) -> str:
        count, channels = self.vectors.shape
        place = f" at {self.about['place']}" if self.about.get("place") else ""
        return f"<Direction{place}: {count} x {channels:,}>"
