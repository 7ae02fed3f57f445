import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from trocar_server.spool.files.header import DTYPE_NAMES, Item, header, most_bytes

SIZE = 4096


def written(path: Path, items: list[Item], data: bytes) -> Path:
    path.write_bytes(header(items, len(data), SIZE) + data)
    return path


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_the_library_reads_a_tensor_with_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(24).remainder(2).to(dtype)
    data = bytes(values.view(torch.uint8).tolist())
    path = written(
        tmp_path / "one.safetensors", [Item("7", dtype, 64, len(data))], bytes(64) + data + bytes(9)
    )
    with safe_open(path, "pt") as file:
        found = file.get_tensor("7")
        assert file.keys() == ["7", "gap.0", "gap.2"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def test_gaps_are_bytes_between_the_tensors_and_behind_them(tmp_path: Path) -> None:
    items = [
        Item("1", torch.float32, 64, 400),
        Item("2", torch.bool, 4096, 3),
        Item("3", torch.int64, 4099, 8),
    ]
    path = written(tmp_path / "some.safetensors", items, bytes(8192))
    with safe_open(path, "pt") as file:
        shapes = {
            name: (str(file.get_slice(name).get_dtype()), file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118 - it is no mapping
        }
    assert shapes == {
        "1": ("F32", [100]),
        "2": ("BOOL", [3]),
        "3": ("I64", [1]),
        "gap.0": ("U8", [64]),
        "gap.2": ("U8", [4096 - 464]),
        "gap.5": ("U8", [8192 - 4107]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.float8_e8m0fnu], ids=str)
def test_what_the_format_cannot_name_is_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = written(tmp_path / "odd.safetensors", [Item("1", dtype, 0, 18)], bytes(18))
    with safe_open(path, "pt") as file:
        assert file.get_tensor("1").dtype == torch.uint8
        assert file.get_tensor("1").shape == (18,)


def test_a_remark_is_metadata(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", [Item("1", torch.int8, 0, 4, "float32 as int8")], bytes(4))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"1": "float32 as int8"}


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    with safe_open(written(tmp_path / "none.safetensors", [], b""), "pt") as file:
        assert list(file.keys()) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**40),
            st.integers(0, 4095),
            st.sampled_from([*DTYPE_NAMES]),
            st.sampled_from(["", "r" * 70]),
        ),
        max_size=30,
    )
)
def test_the_room_that_is_counted_is_enough(blocks: list[tuple[int, int, torch.dtype, str]]) -> None:
    items, end = [], 2**44
    for number, (size, gap, dtype, remark) in enumerate(blocks):
        items.append(Item(str(10**9 + number), dtype, end + gap, size, remark))
        end += gap + size
    text = header(items, end + 1, 1 << 20)[8:].rstrip()
    json.loads(text)
    assert len(text) <= 64 + 110 + sum(map(most_bytes, items))
