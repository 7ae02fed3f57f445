"""Vectors by block as GGUF files, read as repeng reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar

gguf: Any = pytest.importorskip("gguf")
LAYERS = {layer: trocar.Direction.of(np.random.default_rng(layer).normal(size=16)) for layer in (3, 11)}


def test_a_file_is_what_repeng_imports(tmp_path: Path) -> None:
    trocar.Direction.save_layers(tmp_path / "x.gguf", LAYERS, "llama")
    # What ControlVector.import_gguf of repeng does.
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    field = reader.get_field
    assert bytes(field("general.architecture").parts[-1]) == b"controlvector"
    assert bytes(field("controlvector.model_hint").parts[-1]) == b"llama"
    assert int(field("controlvector.layer_count").parts[-1][0]) == 2
    tensors = {int(each.name.removeprefix("direction.")): each.data for each in reader.tensors}
    for layer, direction in LAYERS.items():
        np.testing.assert_array_equal(tensors[layer], direction.vectors[0].astype(np.float32))


def test_a_file_of_repeng_is_read(tmp_path: Path) -> None:
    # What ControlVector.export_gguf of repeng does.
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(LAYERS))
    for layer, direction in LAYERS.items():
        writer.add_tensor(f"direction.{layer}", direction.vectors[0].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = trocar.Direction.load_layers(tmp_path / "y.gguf")
    assert read.keys() == LAYERS.keys()
    for layer, direction in read.items():
        np.testing.assert_allclose(direction.vectors, LAYERS[layer].vectors, rtol=1e-6)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ValueError, match="no GGUF file"):
        trocar.Direction.load_layers(tmp_path / "no.gguf")
    with pytest.raises(FileNotFoundError):
        trocar.Direction.load_layers(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match=r"must end in \.gguf"):
        trocar.Direction.save_layers(tmp_path / "x.bin", LAYERS)
    with pytest.raises(ValueError, match="no layers"):
        trocar.Direction.save_layers(tmp_path / "x.gguf", {})
