"""Tokens as the server sees them: expiry and changes, with clocks of the test's own."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from trocar_server.auth import Caller, LiveGrants, Scope, TokenFile
from trocar_server.errors import ServiceError

START_S = 1_800_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = float(START_S)

    def __call__(self) -> float:
        return self.now_s


class Setup:
    """A file and what a server sees of it."""

    def __init__(self, folder: Path) -> None:
        self.file = TokenFile(folder)
        self.clock = Clock()
        self.live = LiveGrants(self.file, now=self.clock, clock=self.clock)

    def add(self, name: str, *scopes: Scope, lifetime_s: int | None = None, certificate: bool = False) -> str:
        end_s = None if lifetime_s is None else START_S + lifetime_s
        _, token = self.file.add(name, scopes, expires_at_s=end_s, now_s=START_S, for_certificate=certificate)
        return token or ""

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_a_token_is_its_names(setup: Setup) -> None:
    tokens = [setup.add("alice", Scope.RUN), setup.add("bob", Scope.ADMIN), setup.add("alice", Scope.READ)]
    assert setup.live.load() == 3
    assert [setup.live.of_token(token) for token in tokens] == [
        Caller("alice", frozenset({Scope.RUN, Scope.READ})),
        Caller("bob", frozenset(Scope)),
        Caller("alice", frozenset({Scope.READ})),
    ]


@pytest.mark.parametrize(
    "change", [str.upper, str.strip, lambda t: t[:-1], lambda t: t + "\ud800", lambda t: ""]
)
def test_nothing_but_the_token_is_the_token(setup: Setup, change: object) -> None:
    token = setup.add("alice", Scope.RUN)
    setup.live.load()
    changed = change(token)  # type: ignore[operator]
    assert (setup.live.of_token(changed) is not None) == (changed == token)


def test_a_token_ends_at_its_second(setup: Setup) -> None:
    token = setup.add("alice", Scope.RUN, lifetime_s=100)
    setup.live.load()
    setup.later(99.9)
    assert setup.live.of_token(token) is not None
    setup.later(0.1)
    assert setup.live.of_token(token) is None
    assert setup.live.load() == 0


def test_a_change_is_seen_after_a_second_and_not_looked_for_before(setup: Setup) -> None:
    old = setup.add("alice", Scope.RUN)
    setup.live.load()
    new = setup.add("alice", Scope.RUN)
    setup.file.revoke(old)
    setup.later(0.9)
    assert (setup.live.of_token(old) is None, setup.live.of_token(new) is None) == (False, True)
    setup.later(0.1)
    assert (setup.live.of_token(old) is None, setup.live.of_token(new) is None) == (True, False)


def test_the_first_token_is_seen_though_there_was_no_file(setup: Setup) -> None:
    assert setup.live.load() == 0
    token = setup.add("alice", Scope.RUN)
    setup.later(1)
    assert setup.live.of_token(token) is not None
    setup.file.path.unlink()
    setup.later(1)
    assert setup.live.of_token(token) is None


def test_a_file_that_cannot_be_trusted_lets_nobody_in_and_is_logged_once(setup: Setup) -> None:
    token = setup.add("alice", Scope.RUN)
    setup.live.load()
    setup.file.path.chmod(0o644)
    with capture_logs() as lines:
        for _ in range(3):
            setup.later(1)
            assert setup.live.of_token(token) is None
    assert [line["log_level"] for line in lines] == ["error"]
    setup.file.path.chmod(0o600)
    setup.later(1)
    assert setup.live.of_token(token) is not None


def test_a_server_does_not_start_with_a_damaged_file(setup: Setup) -> None:
    setup.file.path.touch(0o600)
    with pytest.raises(ServiceError, match="cannot be trusted"):
        setup.live.load()


def test_a_certificates_name_has_what_its_entries_say_together(setup: Setup) -> None:
    setup.add("alice", Scope.RUN, certificate=True)
    setup.add("alice", Scope.TRAIN, lifetime_s=10, certificate=True)
    setup.live.load()
    assert setup.live.of_certificate("alice") == Caller(
        "alice", frozenset({Scope.RUN, Scope.TRAIN, Scope.READ})
    )
    setup.later(10)
    assert setup.live.of_certificate("alice") == Caller("alice", frozenset({Scope.RUN, Scope.READ}))
    assert setup.live.of_certificate("Alice") is None


def test_a_certificate_does_not_have_what_a_token_of_its_name_has(setup: Setup) -> None:
    setup.add("alice", Scope.ADMIN)
    setup.add("bob", Scope.ADMIN, certificate=True)
    setup.live.load()
    assert setup.live.of_certificate("alice") is None
    assert setup.live.of_token("") is None
    assert setup.live.of_token("bob") is None
