"""Layer vectors: one vector for each block of a model, as other libraries keep them.

vectors = load_layers("honest.gguf")         # {block: vector}, of repeng and llama.cpp
save_layers("honest.gguf", vectors, "llama")

repeng writes GGUF files of the architecture `controlvector` with tensors `direction.K`, which are added to
the output of block K (`ControlVector.export_gguf` of repeng/extract.py, 0.4); a vector of steering-vectors
has `layer_activations`, a mapping from block to vector.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trocar._base.replacement import replacement
from trocar._base.tensors import as_numpy
from trocar._extras import need

_GGUF = ".gguf"
_ARCHITECTURE = "controlvector"
_TENSOR = re.compile(r"direction\.(\d+)")


def save_layers(
    path: str | os.PathLike[str], layers: Mapping[int, NDArray[np.float64]], model_type: str
) -> None:
    """Write a GGUF file; see `Direction.save_layers`.

    Raises:
        ValueError: The name does not end in `.gguf`, or there are no layers.
        MissingExtraError: gguf is not installed.
    """
    target = _checked(path)
    if not layers:
        raise ValueError("there are no layers to write")
    import gguf  # type: ignore[import-not-found,unused-ignore] # an extra

    with replacement(target) as partial:
        writer: Any = gguf.GGUFWriter(partial, _ARCHITECTURE)
        writer.add_string(f"{_ARCHITECTURE}.model_hint", model_type)
        writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(layers))
        for layer, vector in sorted(layers.items()):
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(vector, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def load_layers(path: str | os.PathLike[str]) -> dict[int, NDArray[np.float64]]:
    """Read the vectors of a GGUF file by block; see `Direction.load_layers`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has no vectors of blocks.
        MissingExtraError: gguf is not installed.
    """
    source = _checked(path)
    if not source.is_file():
        raise FileNotFoundError(2, "no such file", str(source))
    import gguf  # type: ignore[import-not-found,unused-ignore] # an extra

    try:
        reader: Any = gguf.GGUFReader(source)
        named = ((_TENSOR.fullmatch(each.name), each.data) for each in reader.tensors)
        layers = {int(name.group(1)): np.array(data, np.float64) for name, data in named if name}
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{source} is no GGUF file of vectors ({error})") from error
    if not layers or any(vector.ndim != 1 for vector in layers.values()):
        raise ValueError(f"{source} has no vectors 'direction.K' of blocks")
    return layers


def layers_of(given: Any) -> dict[int, NDArray[np.float64]]:
    """Return the vector of each block of a mapping, or of an object with `layer_activations`.

    Raises:
        TypeError: It is neither.
    """
    mapping = getattr(given, "layer_activations", given)
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{given!r:.60} has no vectors by block; give a mapping such as {{12: vector}}")
    return {int(layer): np.asarray(as_numpy(vector), np.float64) for layer, vector in mapping.items()}


def _checked(path: str | os.PathLike[str]) -> Path:
    need("a GGUF file", "gguf", "gguf")
    chosen = Path(path)
    if chosen.suffix != _GGUF:
        raise ValueError(f"{chosen.name!r} must end in {_GGUF}, the format of vectors by block")
    return chosen
