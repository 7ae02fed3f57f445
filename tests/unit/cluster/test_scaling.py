"""Autoscaling policies, with the context that Ray Serve gives them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize(
    ("waiting", "expected"),
    [({}, 1), ({"a": 0.0}, 1), ({"a": 1.9}, 1), ({"a": 3.0, "b": 2.5}, 3), ({"a": 99.0}, 4)],
)
def test_replicas_follow_the_work_that_waits(waiting: dict[str, float], expected: int) -> None:
    from trocar_server.cluster.scaling import METRIC, ByWaitingWork

    context: Any = SimpleNamespace(
        aggregated_metrics={METRIC: waiting} if waiting else None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert ByWaitingWork(2.0)(context) == (expected, {})
