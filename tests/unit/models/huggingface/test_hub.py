"""The cache of the Hub: downloaded once, by commit and by kind of file, and verified at every load."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.transformers_folders import save_family
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.hub import cached_folder, repository_folder
from trocar_server.models.source import parse_source

COMMIT = "0123456789" * 4
SOURCE = parse_source(f"hf:org/name@{COMMIT}")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of a Hub client that makes a folder of a tiny model, as the real one does."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        save_family("bert", options["local_dir"])
        (options["local_dir"] / ".cache").mkdir()
        return str(options["local_dir"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_a_repository_is_downloaded_once_at_its_commit_without_pickles_and_code(
    tmp_path: Path, downloads: list[dict[str, Any]]
) -> None:
    folder = repository_folder(SOURCE, tmp_path)
    assert repository_folder(SOURCE, tmp_path) == folder
    assert len(downloads) == 1
    assert downloads[0]["repository"] == "org/name"
    assert downloads[0]["revision"] == COMMIT
    assert not {"*.bin", "*.py", "*"} & set(downloads[0]["allow_patterns"])
    assert sorted(file.name for file in folder.iterdir()) == [
        ".trocar-sha256",
        "config.json",
        "model.safetensors",
    ]


def test_a_folder_that_another_server_loads_from_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repository: str, **options: Any) -> None:
        options["local_dir"].mkdir()
        (options["local_dir"] / "config.json").write_text("{}")
        if len(inodes) == 0:  # another server begins later and is faster
            inodes.append(0)
            inodes.append(repository_folder(SOURCE, tmp_path).joinpath("config.json").stat().st_ino)

    inodes: list[int] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = repository_folder(SOURCE, tmp_path)
    assert (folder / "config.json").stat().st_ino == inodes[1]
    assert [path.name for path in (tmp_path / "hub").iterdir()] == [folder.name]


def test_a_folder_without_a_manifest_is_replaced(tmp_path: Path, downloads: list[dict[str, Any]]) -> None:
    left = cached_folder(SOURCE, tmp_path)
    left.mkdir(parents=True)
    (left / "half.json").write_text("{")
    assert not (repository_folder(SOURCE, tmp_path) / "half.json").exists()
    assert len(downloads) == 1


@pytest.mark.parametrize("damage", ["changed", "added", "removed"])
def test_a_file_that_differs_is_refused(tmp_path: Path, downloads: list[dict[str, Any]], damage: str) -> None:
    config = repository_folder(SOURCE, tmp_path) / "config.json"
    if damage == "changed":
        config.write_text("{}")
    elif damage == "added":
        config.with_name("tokenizer_config.json").write_text("{}")
    else:
        config.unlink()
    with pytest.raises(ServiceError) as error:
        repository_folder(SOURCE, tmp_path)
    assert error.value.reason is ErrorReason.WEIGHTS_CORRUPT


def test_a_download_that_fails_leaves_nothing_and_says_what_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ServiceError, match=r"hf download org/name --revision") as error:
        repository_folder(SOURCE, tmp_path)
    assert error.value.reason is ErrorReason.WEIGHTS_UNAVAILABLE
    assert not cached_folder(SOURCE, tmp_path).exists()
    assert list((tmp_path / "hub").iterdir()) == []
