"""Recent use: what counts, and what is forgotten."""

from trocar_server.engine.schedule.recent_use import WINDOW_S, RecentUse


class Clock:
    """A clock that is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_seconds_add_up_by_flow() -> None:
    use = RecentUse(Clock())
    for flow, seconds in (("alice", 0.5), ("bob", 1.0), ("alice", 0.25)):
        use.add(flow, seconds)
    assert use.seconds() == {"alice": 0.75, "bob": 1.0}


def test_use_is_forgotten_after_a_minute_and_not_before_50_seconds() -> None:
    clock = Clock()
    use = RecentUse(clock)
    use.add("alice", 1.0)
    clock.now_s += WINDOW_S - 10.1
    use.add("bob", 2.0)
    assert use.seconds() == {"alice": 1.0, "bob": 2.0}
    clock.now_s += 10.1
    assert use.seconds() == {"bob": 2.0}
    clock.now_s += WINDOW_S
    assert use.seconds() == {}
