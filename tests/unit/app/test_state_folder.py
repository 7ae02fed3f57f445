"""Where a server's state lies, and what becomes of that of earlier versions."""

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from trocar_server.app.state_folder import settle
from trocar_server.config import ServerConfig
from trocar_server.doctor.storage_checks import check_data_dir, used_folder
from trocar_server.storage.data_lock import lock_folder

TOKENS, TRAINER = "tokens.json", "trainers/0123/trainer.json"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("TROCAR_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def old(home: Path) -> Path:
    folder = home / ".cache" / "trocar"
    for name in (TOKENS, TRAINER, "weights/resnet18.safetensors", "scratch/x"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


@pytest.fixture
def new(home: Path) -> Path:
    return home / ".local" / "state" / "trocar"


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)) for path in found}


def test_state_and_downloads_have_the_folders_of_the_xdg_specification(
    home: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig()
    assert (config.data_dir, config.weights_dir) == (new, home / ".cache" / "trocar")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "s"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/does/not/count")
    config = ServerConfig()
    assert (config.data_dir, config.weights_dir) == (home / "s" / "trocar", home / ".cache" / "trocar")


def test_weights_go_where_data_dir_was_set_to_unless_cache_dir_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROCAR_DATA_DIR", str(home / "data"))  # as in the container
    assert ServerConfig().weights_dir == home / "data"
    assert ServerConfig(cache_dir=home / "cache").weights_dir == home / "cache"


def test_state_of_an_earlier_version_is_moved_with_a_line_in_the_log(old: Path, new: Path) -> None:
    with capture_logs() as lines:
        assert settle(ServerConfig()) == new
    assert files(new) == {TOKENS, TRAINER}
    assert files(old) == {"weights/resnet18.safetensors", "scratch/x"}
    assert [(line["event"], line["names"]) for line in lines] == [
        ("state was moved", "trainers, tokens.json")
    ]
    with capture_logs() as lines:
        assert settle(ServerConfig()) == new
    assert lines == []


def test_a_folder_that_was_chosen_has_no_history(old: Path, home: Path) -> None:
    before = files(old)
    assert settle(ServerConfig(data_dir=home / "mine")) == home / "mine"
    assert files(old) == before


def test_nothing_is_moved_under_a_server_that_runs(old: Path, new: Path) -> None:
    lock = lock_folder(old / "trainers")
    try:
        with capture_logs() as lines:
            assert settle(ServerConfig()) == old
    finally:
        lock.release()
    assert "another server" in lines[0]["why"]
    assert files(new) == set()


@pytest.mark.parametrize("failing", [0, 1])
def test_where_it_cannot_be_moved_the_old_folder_is_used_whole(
    old: Path, new: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.rename, []

    def rename(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == failing + 1:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    before = files(old)
    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(os, "rename", rename)
        assert settle(ServerConfig()) == old
    assert (files(old), files(new)) == (before, set())
    assert lines[-1]["event"] == "state was not moved; the old folder stays in use"


def test_what_is_in_both_stays_where_it_is_and_is_told(old: Path, new: Path) -> None:
    new.mkdir(parents=True)
    (new / TOKENS).write_text("the new ones")
    with capture_logs() as lines:
        assert settle(ServerConfig()) == new
    assert (new / TOKENS).read_text() == "the new ones"
    assert (old / TOKENS).read_text() == TOKENS
    assert files(new) == {TOKENS, TRAINER}
    assert (lines[0]["event"], lines[0]["names"]) == ("state exists in two folders", TOKENS)


def test_a_move_that_was_cut_off_is_finished_at_the_next_start(old: Path, new: Path) -> None:
    new.mkdir(parents=True)
    (old / "trainers").rename(new / "trainers")
    assert settle(ServerConfig()) == new
    assert files(new) == {TOKENS, TRAINER}


def test_the_doctor_says_where_state_still_lies_and_moves_nothing(old: Path) -> None:
    before = files(old)
    (first, *_) = check_data_dir(ServerConfig())
    assert (first.level, str(old) in first.text) == ("WARN", True)
    assert used_folder(ServerConfig()) == old
    assert files(old) == before
