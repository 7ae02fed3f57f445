"""WebDataset shards, well-made and hostile; `webdataset`'s own naming rule is the reference."""

import io
import re
import tarfile
from pathlib import Path

import pytest

from trocar._sources.sample import MAX_SAMPLE_BYTES, Source
from trocar._sources.webdataset import webdataset_source
from trocar.errors import SourceError

Member = tuple[str, bytes]


def shard(path: Path, members: list[Member], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def loaded(source: Source, start: int = 0) -> list[tuple[str, object]]:
    return [(sample.key, sample.load()) for sample in source.samples(start)]


def test_members_with_one_key_are_one_sample(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "a.tar", [("x/1.cls", b"3"), ("x/1.jpg", b"one"), ("x/2.png", b"two"), ("x/2.json", b"{}")]
    )
    assert loaded(webdataset_source([path])) == [("x/1", b"one"), ("x/2", b"two")]


def test_key_ends_at_the_first_dot_of_the_file_name(tmp_path: Path) -> None:
    names = ["a.b/001.left.jpg", "./c/002.jpg", "/abs/003.JPG", "../../004.jpg", "d/005.seg.png"]
    path = shard(tmp_path / "a.tar", [(name, b"x") for name in names])
    reference = [re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name) for name in names]  # webdataset.tariterators
    assert [key for key, _ in loaded(webdataset_source([path]))] == [match[1] for match in reference if match]


def test_shards_follow_one_another_and_any_sample_can_be_first(tmp_path: Path) -> None:
    paths = [
        shard(tmp_path / f"{number}.tar", [(f"{number}-{index}.jpg", b"%d" % index) for index in range(5)])
        for number in range(3)
    ]
    source = webdataset_source(paths)
    whole = loaded(source)
    assert len(whole) == 15
    for start in range(17):
        assert loaded(source, start) == whole[start:]
    fractions = [sample.fraction or 0 for sample in source.samples(0)]
    assert fractions == sorted(fractions)
    assert fractions[0] > 0
    assert fractions[-1] <= 1


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names_are_read(tmp_path: Path, format: int) -> None:
    name = "d" * 90 + "/" + "k" * 60 + ".jpg"
    path = shard(tmp_path / "a.tar", [(name, b"x"), ("é ü.jpg", b"y")], format)
    assert loaded(webdataset_source([path])) == [(name[:-4], b"x"), ("é ü", b"y")]


def test_jpg_comes_before_other_images_of_a_sample(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("1.mask.png", b"mask"), ("1.png", b"png"), ("1.jpg", b"jpg")])
    assert loaded(webdataset_source([path])) == [("1", b"jpg")]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.cls", b"3"), ("1.json", b"")], "sample '1' of .* has no image .*but cls, json"),
        ([("1.jpg", b"a"), ("1.jpg", b"b")], r"has 2 members \.jpg"),
    ],
)
def test_sample_without_one_image_fails_alone(tmp_path: Path, members: list[Member], message: str) -> None:
    path = shard(tmp_path / "a.tar", [("0.jpg", b"x"), *members, ("2.jpg", b"y")])
    first, bad, last = webdataset_source([path]).samples(0)
    with pytest.raises(SourceError, match=message):
        bad.load()
    assert [first.load(), last.load()] == [b"x", b"y"]


def test_links_devices_and_hidden_members_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (
            ("1.jpg", tarfile.SYMTYPE),
            ("2.jpg", tarfile.LNKTYPE),
            ("3.jpg", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "secret.jpg")
            archive.addfile(info)
        for name in ("4", "__meta__.jpg", ".5.jpg"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "4" else tarfile.REGTYPE
            archive.addfile(info)
    assert loaded(webdataset_source([path])) == []


def test_nothing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "a.tar", [(f"{tmp_path}/evil.jpg", b"x"), ("../evil.jpg", b"y")])
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert len(loaded(webdataset_source([path]))) == 2
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["a.tar", "here"]


def test_member_of_a_huge_size_fails_without_being_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("1.jpg")
    info.size = MAX_SAMPLE_BYTES + 1
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf())
    with path.open("r+b") as file:
        file.truncate(MAX_SAMPLE_BYTES + 4096)  # sparse: takes no room
    (sample,) = webdataset_source([path]).samples(0)
    with pytest.raises(SourceError, match="more than 256 MiB"):
        sample.load()


@pytest.mark.parametrize("size", [700, 1200, 2000, 2600])
def test_archive_that_is_cut_off_is_never_taken_for_a_short_one(tmp_path: Path, size: int) -> None:
    path = shard(tmp_path / "a.tar", [(f"{index}.jpg", bytes([index + 1]) * 600) for index in range(3)])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SourceError):
        loaded(webdataset_source([path]))


def test_damage_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [(f"{index}.jpg", b"x" * 600) for index in range(3)])
    data = bytearray(path.read_bytes())
    data[1536:1600] = b"\xff" * 64  # the second header
    path.write_bytes(data)
    samples = webdataset_source([path]).samples(0)
    with pytest.raises(SourceError, match=r"a\.tar is damaged at byte 1536"):
        list(samples)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b compressed", b"x" * 5000])
def test_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.tar is not an uncompressed tar archive"):
        loaded(webdataset_source([tmp_path / "a.tar"]))


def test_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.tar: No such file"):
        webdataset_source([tmp_path / "a.tar"])
