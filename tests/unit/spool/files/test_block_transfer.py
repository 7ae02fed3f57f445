from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.scale import count
from trocar_server.spool.files.block_transfer import Place, Transfer, phase_of
from trocar_server.spool.files.chunks import ChunkFile
from trocar_server.spool.files.direct_memory import BufferPool, storage_bytes
from trocar_server.spool.files.encoding import EncodingOptions
from trocar_server.spool.files.header import Item
from trocar_server.spool.spool_errors import SpoolReadError

OPTIONS = [EncodingOptions(), EncodingOptions("bf16"), EncodingOptions("int8")]


def stored(
    chunk: ChunkFile, values: torch.Tensor, has_checksum: bool = False, options: EncodingOptions = OPTIONS[0]
) -> Place:
    """Write a tensor where it lies, from its first element on."""
    source = storage_bytes(values.untyped_storage(), values.untyped_storage().nbytes())
    source = source[values.storage_offset() * values.itemsize :][: values.nbytes]
    encoding = options.choose(source, values.dtype)
    item = Item("1", encoding.stored_dtype, 0, encoding.stored_bytes(source.nbytes), encoding.remark)
    offset = chunk.place(item, phase_of(values.data_ptr(), encoding))
    return Transfer(has_checksum).write(chunk, offset, source, values.data_ptr(), encoding)


def loaded(place: Place, like: torch.Tensor) -> torch.Tensor:
    storage = Transfer().read(place, like.nbytes, BufferPool(1 << 20))
    assert storage.nbytes() == like.nbytes
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.contiguous().stride())


@pytest.fixture
def chunk(tmp_path: Path) -> ChunkFile:
    return ChunkFile.create(tmp_path / "00000001.safetensors", 1 << 30)


@given(first=st.integers(0, 9000), count=st.one_of(st.integers(1, 20_000), st.sampled_from([600_000])))
@settings(max_examples=count(150))
def test_bytes_come_back_wherever_they_lay(
    first: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chunk = ChunkFile.create(tmp_path_factory.mktemp("t") / "00000001.safetensors", 1 << 30)
    values = torch.arange(first + count, dtype=torch.int32)[first:]
    before = stored(chunk, torch.full((100,), 7))
    place = stored(chunk, values, has_checksum=True)
    after = stored(chunk, torch.full((100,), 8))
    assert torch.equal(loaded(place, values), values)
    assert torch.equal(loaded(before, torch.empty(100, dtype=torch.int64)), torch.full((100,), 7))
    assert torch.equal(loaded(after, torch.empty(100, dtype=torch.int64)), torch.full((100,), 8))


def test_a_block_has_the_alignment_that_it_had(chunk: ChunkFile) -> None:
    values = torch.arange(10_000)[8:]
    storage = Transfer().read(stored(chunk, values), values.nbytes, BufferPool(0))
    assert storage.data_ptr() % 4096 == values.data_ptr() % 4096


def test_memory_at_odd_addresses_is_copied(chunk: ChunkFile) -> None:
    values = torch.arange(100, dtype=torch.uint8).repeat(30_000)[13:]
    place = stored(chunk, values, has_checksum=True)
    assert place.offset % 4096 == 0
    assert torch.equal(loaded(place, values), values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 1023, 3_000_001])
def test_encoded_blocks_are_what_the_encoding_makes_of_them(
    chunk: ChunkFile, options: EncodingOptions, count: int
) -> None:
    for values in (torch.randn(count), torch.rand(count) < 0.5):
        place = stored(chunk, values, True, options)
        found = loaded(place, values)
        scale = place.encoding.scale
        exact = {"bf16": values.to(torch.bfloat16).to(values.dtype), "int8": (values / scale).round() * scale}
        expected = (
            exact[options.store_dtype] if options.store_dtype and values.dtype != torch.bool else values
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("where", [0, 0.5, 1])
@pytest.mark.parametrize("kind", [torch.float32, torch.bool], ids=str)
def test_one_altered_bit_is_found(
    chunk: ChunkFile, options: EncodingOptions, where: float, kind: torch.dtype
) -> None:
    values = torch.randn(700_000).to(kind)
    place = stored(chunk, values, True, options)
    position = place.offset + round(where * (place.byte_count - 1))
    with chunk.path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(SpoolReadError, match=r"00000001\.safetensors was modified: the checksum"):
        loaded(place, values)


def test_bytes_around_a_block_are_not_in_its_checksum(chunk: ChunkFile) -> None:
    values = torch.randn(5000)
    place = stored(chunk, values, has_checksum=True)
    with chunk.path.open("r+b") as file:
        file.seek(place.offset + place.byte_count)
        file.write(b"!")
    assert torch.equal(loaded(place, values), values)


def test_without_being_asked_for_there_is_no_checksum(chunk: ChunkFile) -> None:
    assert stored(chunk, torch.randn(5000)).checksum is None
