"""The feature cache alone, against a model of it that is a plain list."""

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.reply_cache import KeptReply, ReplyCache

BUDGET = 20_000


def reply(size: int = 0, version: str = "v", head: bytes = b"head") -> KeptReply:
    return KeptReply(version, head, (np.zeros(size, np.uint8).data.toreadonly(),) if size else ())


ONE = reply(1000).byte_count


def test_what_was_kept_comes_back_as_the_same_object() -> None:
    cache, kept = ReplyCache(BUDGET), reply(10)
    assert cache.put("a", b"k", kept)
    assert cache.get("a", b"k") is kept


def test_nobody_hits_on_what_another_has_kept() -> None:
    cache = ReplyCache(BUDGET)
    cache.put("a", b"k", reply())
    assert cache.get("b", b"k") is None
    assert cache.get("", b"k") is None


def test_hits_and_misses_are_counted() -> None:
    cache = ReplyCache(BUDGET)
    cache.put("a", b"k", reply())
    for owner, key in (("a", b"k"), ("a", b"other"), ("b", b"k")):
        cache.get(owner, key)
    assert (cache.hit_count, cache.miss_count) == (1, 2)


def test_nothing_is_kept_without_a_budget() -> None:
    cache = ReplyCache(0)
    assert not cache.put("a", b"k", reply())
    assert (len(cache), cache.byte_count) == (0, 0)


def test_a_reply_larger_than_everything_is_refused_and_removes_what_it_would_replace() -> None:
    cache = ReplyCache(BUDGET)
    cache.put("a", b"k", reply())
    cache.put("a", b"other", reply())
    assert not cache.put("a", b"k", reply(BUDGET))
    assert cache.get("a", b"k") is None
    assert cache.get("a", b"other") is not None


def test_the_entry_that_was_not_used_for_longest_goes_first() -> None:
    cache = ReplyCache(2 * ONE)
    cache.put("a", b"1", reply(1000))
    cache.put("a", b"2", reply(1000))
    cache.get("a", b"1")
    cache.put("a", b"3", reply(1000))
    assert [cache.get("a", key) is not None for key in (b"1", b"2", b"3")] == [True, False, True]


def test_who_holds_most_makes_room_for_others() -> None:
    cache = ReplyCache(10 * ONE)
    for i in range(10):
        cache.put("greedy", bytes([i]), reply(1000))
    for i in range(5):
        cache.put("modest", bytes([i]), reply(1000))
    assert all(cache.get("modest", bytes([i])) for i in range(5))
    assert [cache.get("greedy", bytes([i])) is None for i in range(10)] == [True] * 5 + [False] * 5
    cache.put("greedy", b"more", reply(1000))  # beyond an equal share: at its own cost
    assert all(cache.get("modest", bytes([i])) for i in range(5))


def test_a_model_that_is_gone_takes_its_replies_along() -> None:
    cache = ReplyCache(BUDGET)
    cache.put("a", b"1", reply(10, "old"))
    cache.put("b", b"1", reply(10, "old"))
    cache.put("a", b"2", reply(10, "new"))
    cache.drop("old")
    assert len(cache) == 1
    assert cache.byte_count == reply(10).byte_count
    assert cache.get("a", b"2") is not None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "drop"]),
        st.sampled_from("abc"),
        st.integers(0, 7),
        st.integers(0, 6000),
        st.sampled_from(["v1", "v2"]),
    ),
    max_size=60,
)


@given(STEPS, st.integers(0, BUDGET))
def test_any_history_keeps_the_bound_and_agrees_with_a_list(
    steps: list[tuple[str, str, int, int, str]], budget: int
) -> None:
    cache = ReplyCache(budget)
    model: list[tuple[str, bytes, KeptReply]] = []  # the least recently used first
    for action, owner, number, size, version in steps:
        key = bytes([number])
        if action == "drop":
            cache.drop(version)
            model = [entry for entry in model if entry[2].version != version]
        elif action == "get":
            wanted = [entry for entry in model if entry[:2] == (owner, key)]
            assert cache.get(owner, key) is (wanted[0][2] if wanted else None)
            model = [entry for entry in model if entry not in wanted] + wanted
        else:
            kept = reply(size, version)
            model = [entry for entry in model if entry[:2] != (owner, key)]
            if cache.put(owner, key, kept):
                model.append((owner, key, kept))
            model = evicted(model, budget, owner)
        assert len(cache) == len(model)
        assert cache.byte_count == sum(entry[2].byte_count for entry in model) <= budget


def evicted(
    model: list[tuple[str, bytes, KeptReply]], budget: int, newest: str
) -> list[tuple[str, bytes, KeptReply]]:
    """Remove entries as the cache should: the oldest of whoever holds most."""
    while sum(entry[2].byte_count for entry in model) > budget:
        held: dict[str, int] = {}
        for owner, _, kept in model:
            held[owner] = held.get(owner, 0) + kept.byte_count
        most = max(held.values())
        largest = sorted(owner for owner, count in held.items() if count == most)
        owner = newest if newest in largest else largest[-1]
        victim = next(entry for entry in model if entry[0] == owner)
        model = [entry for entry in model if entry is not victim]
    return model


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_the_bytes_that_are_counted_are_no_less_than_the_bytes_that_are_used(size: int) -> None:
    cache, count = ReplyCache(1 << 30), 2000
    head = b"h" * 50
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(count):
            kept = KeptReply(bytes([65]).decode() * 32, head + bytes(i % 7), (np.zeros(size, np.uint8).data,))
            cache.put("a" * 64, i.to_bytes(32, "big"), kept)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(cache) == count
    assert used <= cache.byte_count < used + count * 1600
    assert sys.getsizeof(cache) < 1000
