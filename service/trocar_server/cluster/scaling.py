"""Autoscaling policies of Ray Serve: replicas by the seconds of work that wait, gateways by nodes."""

import math
from typing import Any

import ray

METRIC = "waiting_s"
"""Name of the metric that a replica records: seconds of admitted work that is not done."""


class ByWaitingWork:
    """Number of replicas by the work that waits for all of them together.

    Args:
        waiting_s: Seconds of work for each replica.
    """

    def __init__(self, waiting_s: float) -> None:
        self._waiting_s = waiting_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and no state."""
        by_replica = (context.aggregated_metrics or {}).get(METRIC, {})
        wanted = math.ceil(sum(by_replica.values()) / self._waiting_s)
        return wanted_count(context, wanted), {}


def one_per_node(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of nodes that are alive, and no state."""
    return wanted_count(context, sum(node["Alive"] for node in ray.nodes())), {}


def wanted_count(context: Any, count: int) -> int:
    """Return a number of replicas within the bounds of a deployment."""
    least: int = context.capacity_adjusted_min_replicas
    most: int = context.capacity_adjusted_max_replicas
    return max(least, min(count, most))
