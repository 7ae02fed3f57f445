"""Which replicas may serve: those of equal weights, in whatever order they come and go."""

from collections.abc import Mapping
from typing import Any

import pytest

from trocar_server.cluster.members import FORGOTTEN_AFTER_S, GONE_S, NEW_FOR_S, WAIT, Members, difference_of

VERSION = "v1"
COMPUTED = {"parts": {}, "buffers": {"angles": [0.5, 1.0, -0.25, 0.0]}}


class Cluster:
    """Members with a clock, and replicas that are a name each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members = Members(lambda: self.now)
        self.now = NEW_FOR_S

    def join(self, name: str, weights: str, version: str = VERSION, **options: Any) -> str:
        return self.members.join(report(name), identity(weights), version, **options)

    def serving(self) -> list[str]:
        return sorted(one["replica_id"] for one in self.members.reports())

    def later(self, seconds: float, *names: str) -> None:
        """Let time pass, in which these replicas report."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            for name in names:
                self.members.report(report(name))


def report(name: str) -> dict[str, Any]:
    return {"replica_id": name, "model_id": "m", "node_id": f"node-of-{name}"}


def identity(weights: str) -> Mapping[str, Any]:
    return {"parts": {"weights": weights}, "buffers": {}}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_replicas_of_equal_weights_serve(cluster: Cluster) -> None:
    assert [cluster.join(name, "same") for name in "abc"] == ["", "", ""]
    assert cluster.serving() == ["a", "b", "c"]


def test_a_replica_with_other_weights_is_refused_in_words_and_never_listed(cluster: Cluster) -> None:
    assert cluster.join("a", "one") == ""
    why = cluster.join("b", "two")
    for part in ("model 'm'", "node-of-", "draws random weights", "[models.m] weights", "random:0"):
        assert part in why
    assert cluster.members.refused() == {"m": why}
    cluster.members.report(report("b"))
    assert cluster.serving() == ["a"]


def test_a_report_of_a_replica_that_has_not_joined_says_nothing(cluster: Cluster) -> None:
    cluster.members.report(report("a"))
    assert cluster.serving() == []


def test_the_replica_that_takes_the_place_of_the_last_one_waits_until_that_is_surely_gone(
    cluster: Cluster,
) -> None:
    """It may only have been slow, and a factory without fixed weights has no others to offer."""
    cluster.join("a", "one")
    cluster.later(FORGOTTEN_AFTER_S + 1)
    assert cluster.join("b", "two") == WAIT
    assert cluster.join("a", "one", is_known=True) == ""
    assert "refused" in cluster.join("b", "two")
    cluster.members.forget("a")
    assert cluster.join("b", "two") == WAIT
    cluster.later(GONE_S + 1)
    assert cluster.join("b", "two") == ""
    assert cluster.members.refused() == {}


def test_a_replica_with_the_same_weights_takes_the_place_of_a_lost_one_at_once(cluster: Cluster) -> None:
    cluster.join("a", "one")
    cluster.members.forget("a")
    assert cluster.join("b", "one") == ""


def test_a_replica_that_wakes_up_after_another_took_its_place_is_compared_with_that_one(
    cluster: Cluster,
) -> None:
    cluster.join("a", "one")
    cluster.later(GONE_S + 1)
    assert cluster.join("b", "two") == ""
    cluster.members.report(report("a"))
    assert cluster.serving() == ["b"]
    assert "refused" in cluster.join("a", "one", is_known=True)


def test_weights_are_those_of_the_first_as_long_as_any_of_them_serves(cluster: Cluster) -> None:
    for name in "ab":
        cluster.join(name, "one")
    cluster.members.forget("a")
    cluster.later(2 * GONE_S, "b")
    assert "refused" in cluster.join("c", "two")


def test_replicas_of_another_configuration_are_compared_among_themselves(cluster: Cluster) -> None:
    """A rolling update: the old ones and the new ones serve side by side."""
    cluster.join("a", "one")
    assert cluster.join("b", "two", version="v2") == ""
    assert "refused" in cluster.join("c", "three", version="v2")
    assert "refused" in cluster.join("d", "two")
    assert cluster.serving() == ["a", "b"]


def test_a_directory_that_was_started_again_hears_first_of_those_that_serve() -> None:
    now = [0.0]
    members = Members(lambda: now[0])
    assert members.join(report("new"), identity("two"), VERSION) == WAIT
    assert members.join(report("old"), identity("one"), VERSION, is_known=True) == ""
    now[0] = NEW_FOR_S
    assert "refused" in members.join(report("new"), identity("two"), VERSION)


def test_replicas_of_other_models_have_other_weights(cluster: Cluster) -> None:
    cluster.join("a", "one")
    other = {**report("b"), "model_id": "n"}
    assert cluster.members.join(other, identity("two"), VERSION) == ""


def test_another_configuration_has_no_refusals_yet(cluster: Cluster) -> None:
    cluster.join("a", "one")
    cluster.join("b", "two")
    cluster.members.begin_anew()
    assert cluster.members.refused() == {}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ([0.5, 1.0, -0.25, 0.0], False),
        ([0.5, 1.0, -0.25, 1e-6], False),
        ([0.5, 1.0, -0.25, 0.01], True),
        ([0.6, 1.0, -0.25, 0.0], True),
        ([0.0, 0.0, 0.0, 0.0], True),
        ([], True),
    ],
)
def test_computed_tensors_may_differ_by_roundings(other: list[float], differs: bool) -> None:
    found = difference_of(COMPUTED, {"parts": {}, "buffers": {"angles": other} if other else {}})
    assert found == ("its tensor 'angles' differs" if differs else "")
    assert bool(difference_of({"parts": {}, "buffers": {"angles": other}}, COMPUTED)) == differs


def test_weights_are_compared_only_where_both_could_be_hashed() -> None:
    hashed = {"parts": {"weights": "one", "code": "c"}, "buffers": {}}
    assert difference_of(hashed, {"parts": {"code": "c"}, "buffers": {}}) == ""
    assert difference_of(hashed, {"parts": {**hashed["parts"], "weights": "two"}, "buffers": {}})


def test_what_differs_is_named() -> None:
    def of(**parts: str) -> dict[str, Any]:
        return {"parts": parts, "buffers": {}}

    assert difference_of(of(weights="a"), of(weights="b")) == "its weights differ"
    assert difference_of(of(code="a"), of(code="b")) == "its code differs"
    assert difference_of(of(), of(processor="b")) == "its processor differs"
    assert (
        difference_of(of(code="a", weights="a"), of(code="b", weights="b")) == "its code and weights differ"
    )
