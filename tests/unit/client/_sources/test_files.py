"""Image files and folders of them."""

import os
from pathlib import Path

import pytest

from trocar._sources.files import SERVER_SUFFIXES, file_source, folder_source, list_images, read_file
from trocar._sources.sample import MAX_SAMPLE_BYTES
from trocar.errors import SourceError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in (
        "b/2.jpg",
        "b/10.JPG",
        "a.png",
        "B.webp",
        "b.jpeg",
        "notes.txt",
        ".hidden.jpg",
        ".git/x.jpg",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def keys(root: Path, start: int = 0) -> list[str]:
    return [sample.key for sample in folder_source(root, SERVER_SUFFIXES).samples(start)]


def test_images_are_sorted_by_relative_path_and_others_left_out(root: Path) -> None:
    assert keys(root) == ["B.webp", "a.png", "b.jpeg", "b/10.JPG", "b/2.jpg"]
    assert keys(root, 3) == ["b/10.JPG", "b/2.jpg"]
    source = folder_source(root, SERVER_SUFFIXES)
    assert source.count == 5
    assert source.notes == (f"files left out below {root}: 1 of other types",)


def test_samples_give_the_bytes_of_the_files(root: Path) -> None:
    samples = list(folder_source(root, SERVER_SUFFIXES).samples(0))
    assert [sample.load() for sample in samples] == [sample.key.encode() for sample in samples]
    assert [sample.fraction for sample in samples] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_links_are_followed_only_to_files_inside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.jpg"
    outside.write_bytes(b"secret")
    (root / "inside.jpg").symlink_to(root / "a.png")
    (root / "outside.jpg").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "elsewhere").symlink_to(tmp_path)
    (root / "dangling.jpg").symlink_to(root / "none.jpg")
    (root / "dangling.jpg").unlink()
    assert keys(root) == ["B.webp", "a.png", "b.jpeg", "b/10.JPG", "b/2.jpg", "inside.jpg"]
    assert "1 of other types, 1 links to outside of it" in folder_source(root, SERVER_SUFFIXES).notes[0]


def test_prefix_is_put_before_the_keys(root: Path) -> None:
    source = folder_source(root, SERVER_SUFFIXES, prefix="train/")
    assert next(source.samples(0)).key == "train/B.webp"


def test_fingerprint_changes_with_names_sizes_and_times(root: Path) -> None:
    def fingerprint() -> object:
        return folder_source(root, SERVER_SUFFIXES).description["fingerprint"]

    seen = {fingerprint(), fingerprint()}
    assert len(seen) == 1
    (root / "a.png").write_bytes(b"longer than before")
    seen.add(fingerprint())
    os.utime(root / "a.png", ns=(0, 0))
    seen.add(fingerprint())
    (root / "a.png").rename(root / "c.png")
    seen.add(fingerprint())
    (root / "new.jpg").write_bytes(b"")
    seen.add(fingerprint())
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "it is empty"), (["x.bmp", "y.npy"], "none of its 2 files ends in .flac, .jpeg.*--decode client")],
)
def test_folder_without_images_says_what_to_do(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=message):
        folder_source(tmp_path, SERVER_SUFFIXES)


def test_a_folder_that_is_to_have_images_does_not_ask_for_sound(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    with pytest.raises(SourceError, match=r"none of its 1 files ends in \.jpeg, \.jpg, \.png, \.webp;"):
        list_images(tmp_path, SERVER_SUFFIXES)


def test_name_that_is_no_text_becomes_one(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg")).write_bytes(b"x")
    (key,) = keys(tmp_path)
    assert key == "caf\\xe9.jpg"
    assert key.encode("utf-8")


def test_files_keep_their_order_and_names(root: Path) -> None:
    source = file_source([root / "b/2.jpg", root / "a.png"])
    assert [sample.key for sample in source.samples(0)] == [str(root / "b/2.jpg"), str(root / "a.png")]


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"x\.jpg: No such file"):
        file_source([tmp_path / "x.jpg"])


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.jpg").open("wb") as file:
        file.truncate(MAX_SAMPLE_BYTES + 1)  # sparse: takes no room
    with pytest.raises(SourceError, match="more than 256 MiB"):
        read_file(tmp_path / "x.jpg")
