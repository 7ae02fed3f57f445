"""Unix sockets as addresses: which paths are taken, whose they are, and what lies there already."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.listen.unix_socket import (
    MAX_PATH_BYTES,
    check_free,
    owner_only,
    socket_path,
    target_of,
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as opened:
        yield opened


def refusal(path: Path) -> str:
    with pytest.raises(ServiceError) as caught:
        check_free(path)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "unix-abstract:x", ""])
def test_other_hosts_are_no_socket(host: str) -> None:
    assert socket_path(host) is None


@pytest.mark.parametrize("host", ["unix:/run/a.sock", "unix:///run/a.sock"])
def test_a_path_may_follow_one_slash_or_three(host: str) -> None:
    found = socket_path(host)
    assert found is not None
    assert os.path.realpath(found) == os.path.realpath("/run/a.sock")


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert socket_path("unix:a.sock") == tmp_path / "a.sock"


@pytest.mark.parametrize("path", ["", "a\0b", "a,b"])
def test_a_path_that_cannot_be_one_is_refused(path: str) -> None:
    with pytest.raises(ServiceError, match=r"unix:/run/trocar\.sock"):
        socket_path(f"unix:{path}")


def test_the_longest_path_is_what_the_system_says(tmp_path: Path, listener: socket.socket) -> None:
    longest = "/" + "x" * (MAX_PATH_BYTES - 1)
    assert socket_path(f"unix:{longest}") == Path(longest)
    with pytest.raises(ServiceError, match="at most 107 bytes, this one has 108"):
        socket_path(f"unix:{longest}x")
    with pytest.raises(OSError, match="path too long"):
        listener.bind(longest + "xx")


@pytest.mark.parametrize("name", ["a b", "ä", "q?x", "h#x", "p%41"])
def test_odd_names_are_escaped_for_grpc(name: str) -> None:
    target = target_of(Path("/run", name))
    assert target.isascii()
    assert not set(target) & set(" ?#")


def test_a_path_where_nothing_is_is_free(tmp_path: Path) -> None:
    check_free(tmp_path / "a.sock")


def test_a_socket_that_nobody_listens_at_is_free(tmp_path: Path, listener: socket.socket) -> None:
    path = tmp_path / "a.sock"
    listener.bind(str(path))
    check_free(path)


def test_a_socket_in_use_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    path = tmp_path / "a.sock"
    listener.bind(str(path))
    listener.listen()
    assert "another server is listening at 'a.sock'" in refusal(path)


def test_a_socket_whose_queue_is_full_is_in_use(tmp_path: Path, listener: socket.socket) -> None:
    path = tmp_path / "a.sock"
    listener.bind(str(path))
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))
        assert "another server" in refusal(path)


def test_a_file_or_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "is not a socket" in refusal(tmp_path / "file")
    assert "is not a socket" in refusal(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path, listener: socket.socket) -> None:
    listener.bind(str(tmp_path / "a.sock"))
    (tmp_path / "link").symlink_to(tmp_path / "a.sock")
    assert "is not a socket" in refusal(tmp_path / "link")


@pytest.mark.parametrize("folder_mode", [0o755, 0o777])
def test_in_an_open_folder_only_the_owner_may_connect(
    tmp_path: Path, listener: socket.socket, folder_mode: int
) -> None:
    tmp_path.chmod(folder_mode)
    path = tmp_path / "a.sock"
    with owner_only(path):
        listener.bind(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_umask_is_put_back_even_after_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o027)
    try:
        with pytest.raises(OSError, match="busy"), owner_only(tmp_path / "a.sock"):
            raise OSError("busy")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_in_a_private_folder_the_umask_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with owner_only(tmp_path / "a.sock"):
        (tmp_path / "other").touch(0o644)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o644
