"""Tensors in files; the oracle is safetensors itself."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from tests.unit.training.stores import DTYPES, assert_same_tensors, bits, random_tensor
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage import tensor_file
from trocar_server.storage.durable import DamagedError, write_durably
from trocar_server.storage.tensor_file import PIECE_BYTES, lay_out, read_tensor_file

Tensors = dict[str, torch.Tensor]


def content_of(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    layout = lay_out(tensors, metadata or {})
    content = b"".join(layout.pieces())
    assert len(content) == layout.byte_count
    return content


def read(path: Path, content: bytes) -> Tensors:
    path.write_bytes(content)
    return read_tensor_file(path).tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_here_and_in_safetensors(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensors = {"x": random_tensor(shape, dtype)}
    content = content_of(tensors)
    assert_same_tensors(read(tmp_path / "f", content), tensors)
    assert_same_tensors(load(content), tensors)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 99)),
        max_size=8,
    )
)
def test_any_tensors_come_back_from_safetensors(
    drawn: dict[str, tuple[torch.dtype, list[int], int]],
) -> None:
    tensors = {name: random_tensor(tuple(shape), dtype, seed) for name, (dtype, shape, seed) in drawn.items()}
    assert_same_tensors(load(content_of(tensors)), tensors)


def test_files_that_safetensors_wrote_are_read(tmp_path: Path) -> None:
    tensors = {f"{dtype}": random_tensor((3, 5), dtype) for dtype in DTYPES}
    assert_same_tensors(read(tmp_path / "f", save(tensors, {"format": "pt"})), tensors)


def test_views_of_all_kinds_are_written_as_they_look(tmp_path: Path) -> None:
    base = random_tensor((6, 4), torch.float32)
    views = {
        "whole": base,
        "again": base,
        "transposed": base.t(),
        "rows": base[::2],
        "expanded": base[:1].expand(5, 4),
        "tail": base[4:],
        "conjugated": torch.view_as_complex(base.reshape(-1, 2)).conj(),
        "channels last": random_tensor((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(base),
    }
    assert_same_tensors(read(tmp_path / "f", content_of(views)), views)


def test_tensors_are_aligned_to_their_elements() -> None:
    tensors = {"a": random_tensor((3,), torch.bool), "b": random_tensor((3,), torch.float64)}
    content = content_of(tensors)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["b"]["data_offsets"] == [0, 24]


def test_metadata_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(content_of({"x": torch.ones(1)}, {"format": "pt", "note": "ü\n"}))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ü\n"}
    assert read_tensor_file(path).metadata == {"format": "pt", "note": "ü\n"}


def test_nothing_but_a_piece_is_copied(tmp_path: Path) -> None:
    tensors = {"x": random_tensor((8 << 20,), torch.uint8)}
    tracemalloc.start()
    write_durably(tmp_path / "f", lay_out(tensors, {}).pieces())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PIECE_BYTES
    assert_same_tensors(read_tensor_file(tmp_path / "f").tensors, tensors)


def test_what_is_read_owns_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "f"
    found = read(path, content_of({"a": torch.ones(2), "b": torch.ones(2)}))
    found["a"].zero_()
    assert found["b"].tolist() == [1, 1]
    assert bits(read_tensor_file(path).tensors["a"]) == bits(torch.ones(2))


def test_a_dtype_that_the_format_does_not_know_is_refused() -> None:
    with pytest.raises(ServiceError, match="complex128") as error:
        lay_out({"x": torch.ones(1, dtype=torch.complex128)}, {})
    assert error.value.reason is ErrorReason.TRAINER_INVALID


def test_a_header_that_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ServiceError, match="too many for one file"):
        lay_out({"a" * 100: torch.ones(1)}, {})


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: object, offsets: object) -> dict[str, object]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (1 << 63).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        with_header(b"[" * 5000),
        with_header(b"\xff"),
        with_header([]),
        with_header({"__metadata__": {"a": 1}}),
        with_header({"__metadata__": 3}),
        with_header({}, b"rest"),
        with_header({"x": 1}),
        with_header(entry("F32", [1], [0, 4])),
        with_header(entry("F32", [1], [0, 4]), b"12345"),
        with_header(entry("F99", [1], [0, 4]), b"1234"),
        with_header(entry("F32", [2], [0, 4]), b"1234"),
        with_header(entry("F32", [-1, -1], [0, 4]), b"1234"),
        with_header(entry("F32", [True], [0, 4]), b"1234"),
        with_header(entry("F32", [1.0], [0, 4]), b"1234"),
        with_header(entry("F32", "1", [0, 4]), b"1234"),
        with_header(entry("F32", [1], [0, 4, 4]), b"1234"),
        with_header(entry("F32", [1], [4, 8]), b"12345678"),
        with_header(entry("F32", [0, 1 << 61, 4], [0, 0])),
        with_header(entry("F32", [0, 1 << 70], [0, 0])),
        with_header(entry("F32", [1] * 100, [0, 4]), b"1234"),
        with_header(
            {**entry("U8", [3], [0, 3]), "y": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, b"1234"
        ),
    ],
)
def test_what_is_no_such_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DamagedError):
        read(tmp_path / "f", content)


def test_another_size_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content_of({"x": torch.ones(4)}))
    with pytest.raises(DamagedError, match="bytes, not 5"):
        read_tensor_file(tmp_path / "f", 5)
