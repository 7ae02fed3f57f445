"""The file of tokens: what it keeps, who may read it, and that commands do not lose each other's work."""

import hashlib
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.auth import Scope, TokenFile, token_file
from trocar_server.errors import ServiceError

NOW_S = 1_800_000_000.0


def add(file: TokenFile, name: str, *scopes: Scope) -> str:
    _, token = file.add(name, scopes or (Scope.READ,), expires_at_s=None, now_s=NOW_S)
    assert token is not None
    return token


def refused(file: TokenFile) -> str:
    with pytest.raises(ServiceError) as caught:
        file.read()
    assert caught.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert str(file.path.parent) not in caught.value.message
    return caught.value.message


def test_where_there_is_no_file_there_are_no_tokens(tmp_path: Path) -> None:
    assert TokenFile(tmp_path / "nowhere").read() == ()
    assert list(tmp_path.iterdir()) == []


def test_a_token_has_256_bits_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    tokens = [add(file, "alice", Scope.RUN) for _ in range(20)]
    content = file.path.read_text()
    assert len(set(tokens)) == 20
    assert all(len(token.removeprefix("trocar_")) * 6 >= 256 for token in tokens)
    assert not any(token.removeprefix("trocar_") in content for token in tokens)
    assert [grant["token_sha256"] for grant in json.loads(content)["grants"]] == [
        hashlib.sha256(token.encode()).hexdigest() for token in tokens
    ]


def test_the_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        add(TokenFile(tmp_path / "data"), "alice")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
    assert modes == {"tokens.json": 0o600, "tokens.lock": 0o600}
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_what_was_granted_is_read_back(tmp_path: Path) -> None:
    grant, token = TokenFile(tmp_path).add(
        "Jörg of example.org",
        [Scope.TRAIN, Scope.RUN, Scope.RUN],
        expires_at_s=7,
        now_s=5.9,
        for_certificate=True,
    )
    assert token is None
    assert TokenFile(tmp_path).read() == (grant,)
    assert (grant.created_at_s, grant.expires_at_s) == (5, 7)
    assert grant.scopes == frozenset({Scope.RUN, Scope.TRAIN})
    assert [grant.is_expired(now) for now in (6.99, 7, 8)] == [False, True, True]


@pytest.mark.parametrize(
    "name", ["", " ", " a", "a ", "a\n", "a\x00b", "\x1b[1m", "x" * 129, "anonymous", "0" * 64, "\u202e"]
)
def test_a_name_that_could_mislead_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        add(TokenFile(tmp_path), name)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert TokenFile(tmp_path).read() == ()


def test_revoking_a_name_takes_all_of_its_tokens_and_an_id_or_a_token_one(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    tokens = [add(file, name) for name in ("alice", "alice", "alice", "bob")]
    ids = [grant.grant_id for grant in file.read()]
    assert [grant.grant_id for grant in file.revoke(ids[1])] == [ids[1]]
    assert [grant.grant_id for grant in file.revoke(tokens[0])] == [ids[0]]
    assert [grant.name for grant in file.revoke("alice")] == ["alice"]
    assert [grant.name for grant in file.read()] == ["bob"]


def test_a_token_that_cannot_be_revoked_is_not_repeated(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    token = add(file, "alice")
    file.revoke("alice")
    for text in ("alice", token):
        with pytest.raises(ServiceError, match="trocar admin token list") as caught:
            file.revoke(text)
        assert token not in caught.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_may_touch_is_not_trusted(tmp_path: Path, mode: int) -> None:
    file = TokenFile(tmp_path)
    add(file, "alice")
    file.path.chmod(mode)
    assert "0600" in refused(file)


def test_a_link_in_its_place_is_not_trusted(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    add(file, "alice")
    file.path.rename(tmp_path / "other.json")
    file.path.symlink_to(tmp_path / "other.json")
    refused(file)


CONTENTS = [
    b"",
    b"{}x",
    b"[]",
    b"\xff",
    b'{"version": 2}',
    b'{"grants": [{}]}',
    b'{"version": 1, "more": 1}',
    b'{"grants": [{"grant_id": "00000000", "name": "a", "scopes": [], "created_at_s": 0,'
    b' "expires_at_s": null, "token_sha256": null}]}',
    b'{"grants": [{"grant_id": "00000000", "name": "a", "scopes": ["root"], "created_at_s": 0,'
    b' "expires_at_s": null, "token_sha256": null}]}',
    b'{"grants": [{"grant_id": "00000000", "name": "a", "scopes": ["run"], "created_at_s": 0,'
    b' "expires_at_s": null, "token_sha256": "SECRET"}]}',
]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = TokenFile(tmp_path)
    file.path.touch(0o600)
    file.path.write_bytes(content)
    assert "SECRET" not in refused(file)
    for change in (lambda: add(file, "bob"), lambda: file.revoke("a")):
        with pytest.raises(ServiceError):
            change()
    assert file.path.read_bytes() == content


def test_an_unreadable_disk_is_no_empty_file(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    file.path.mkdir(0o700)
    refused(file)


def test_a_write_that_fails_leaves_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TokenFile(tmp_path)
    add(file, "alice")
    before = file.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ServiceError) as caught:
        add(file, "bob")
    assert caught.value.reason is ErrorReason.STORAGE_FULL
    assert file.path.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.json", "tokens.lock"}


def test_what_a_killed_command_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "tokens-0123.partial").write_bytes(b"half")
    add(TokenFile(tmp_path), "alice")
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.json", "tokens.lock"}


def test_commands_at_the_same_time_do_not_lose_each_others_tokens(tmp_path: Path) -> None:
    def make(number: int) -> None:
        for index in range(5):
            add(TokenFile(tmp_path), f"{number}-{index}")

    threads = [threading.Thread(target=make, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({grant.name for grant in TokenFile(tmp_path).read()}) == 30


def test_there_is_an_end_to_how_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "MAX_GRANTS", 2)
    file = TokenFile(tmp_path)
    for name in ("a", "b"):
        add(file, name)
    with pytest.raises(ServiceError) as caught:
        add(file, "c")
    assert caught.value.reason is ErrorReason.QUOTA_EXCEEDED
