"""Rank placement: the workers of a replica's fits as actors on the nodes of the cluster.

    ranks = RankPlacement(config, {"CPU": 2.0}, 600.0, child.send)
    ranks.take({"place": ID, "count": 3, "address": "10.0.0.5:41873", "secret": ..., "own_dir": ...})
    ranks.take({"release": ID})

A placement group takes the resources of all ranks of a launch at once, spread over the nodes, so that two
fits never wait for each other with half of their ranks. The actors do not import torch: the rank is a child
process of each.
"""

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trocar_server.cluster.child_process import ChildFailedError, ChildProcess, Line
from trocar_server.errors import first_line

_POLL_S = 0.2
_ROOM_POLL_S = 1
"""A whole number of seconds: the core of Ray (2.60) takes no fractions."""
_COUNT_EVERY_S = 1.0
_LEAST_CPUS = 0.01
"""Of a rank whose replica takes none: a bundle of Ray has to have something."""


class RankSupervisor:
    """An actor with one rank.

    Args:
        settings: Those of `rank_server`; `host` in its `config` is the node's address where it is missing.
    """

    def __init__(self, settings: Line) -> None:
        placed = settings | {"config": at_address(own_address(), settings["config"])}
        self._child = ChildProcess("trocar_server.cluster.ranks.rank_server", placed, lambda line: None)

    def run(self) -> str:
        """Wait for the end of the rank; returns why it ended."""
        try:
            return self._child.wait_ready()  # which it never is
        except ChildFailedError as error:
            return str(error)


class RankPlacement:
    """The ranks of one replica's fits. Its methods may be called on any thread, and do not wait.

    Args:
        config: The settings of the replica's server.
        resources: What each rank takes of its node, by Ray's names.
        wait_s: Seconds to wait for these.
        tell: Sends a line to the replica; see `rank_requests`.
    """

    def __init__(
        self, config: Line, resources: dict[str, float], wait_s: float, tell: Callable[[Line], None]
    ) -> None:
        self._config, self._resources = config, resources
        self._wait_s, self._tell = wait_s, tell
        self._launches: dict[str, Event] = {}
        self._changing = Lock()
        self._closed = Event()

    def start(self) -> None:
        """Begin to tell how many ranks there can be."""
        Thread(target=self._count, name="rank-capacity", daemon=True).start()

    def take(self, line: Line) -> None:
        """Take a request of the replica."""
        if "release" in line:
            self._release(line["release"])
            return
        released = Event()
        with self._changing:
            self._launches[line["place"]] = released
        Thread(target=self._hold, args=(line, released), name="ranks", daemon=True).start()

    def close(self) -> None:
        """End all ranks."""
        self._closed.set()
        for own_id in tuple(self._launches):
            self._release(own_id)

    def _count(self) -> None:
        """Tell for how many ranks all nodes have resources, used ones included, as nodes come and go."""
        while not self._closed.wait(_COUNT_EVERY_S):
            try:
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            except Exception:  # noqa: BLE001 - Ray (2.60) has no base class of what a lost head may raise
                continue
            self._tell({"rank_capacity": sum(_fitting(node, self._resources) for node in nodes)})

    def _release(self, own_id: str) -> None:
        with self._changing:
            released = self._launches.pop(own_id, None)
        if released is not None:
            released.set()

    def _hold(self, request: Line, released: Event) -> None:
        """Start ranks and keep them until they are released, or one of them ends."""
        group: Any = None
        actors: list[Any] = []
        try:
            group = placement_group([self._resources] * request["count"], strategy="SPREAD")
            if not self._has_room(group, request, released):
                return
            actors = [self._start(group, request, rank) for rank in range(1, request["count"] + 1)]
            self._watch(request["place"], [actor.run.remote() for actor in actors], released)
        except RayError as error:
            self._tell({"ranks": {"id": request["place"], "lost": first_line(error)}})
        finally:
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

    def _has_room(self, group: Any, request: Line, released: Event) -> bool:
        """Wait for the resources; returns whether they are there."""
        until = time.monotonic() + self._wait_s
        while not group.wait(_ROOM_POLL_S):
            if released.is_set():
                return False
            if time.monotonic() > until:
                no_room = self._no_room(request["count"])
                self._tell({"ranks": {"id": request["place"], "no_room": no_room}})
                return False
        return True

    def _no_room(self, count: int) -> str:
        each = ", ".join(f"{number:g} {name}" for name, number in self._resources.items())
        free = ray.available_resources()
        left = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in self._resources)
        return (
            f"the cluster had no room for {count} more, each with {each} on one node, within "
            f"{self._wait_s:g} s; free on all nodes together: {left}. Use fewer workers, scale models down, "
            "or add nodes"
        )

    def _start(self, group: Any, request: Line, rank: int) -> Any:
        settings = {name: request[name] for name in ("address", "secret", "own_dir")}
        actor: Any = ray.remote(RankSupervisor)
        return actor.options(
            num_cpus=self._resources.get("CPU", 0.0),
            resources={name: count for name, count in self._resources.items() if name != "CPU"},
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank - 1
            ),
        ).remote(settings | {"config": self._config, "rank": rank})

    def _watch(self, own_id: str, runs: list[Any], released: Event) -> None:
        """Wait until they are released; the end of one before is told, once."""
        while not released.wait(_POLL_S):
            ended, _ = ray.wait(runs, num_returns=1, timeout=0)
            if ended and not released.is_set():
                rank, why = 1 + runs.index(ended[0]), _end_of(ended[0])
                self._tell({"ranks": {"id": own_id, "lost": f"rank {rank} ended: {why}"}})
                return


def rank_resources(cpus: float, others: dict[str, float]) -> dict[str, float]:
    """Return what a rank takes of its node: as much as a replica, but no GPU, as ranks compute on CPUs."""
    wanted = {"CPU": cpus, **others}
    return {name: count for name, count in wanted.items() if count > 0} or {"CPU": _LEAST_CPUS}


def at_address(node_address: str, config: Line) -> Line:
    """Return the settings of a server with free ports at the address of its node, where none is set."""
    placed = {"host": node_address, **config, "port": 0}
    return placed | {"metrics_host": placed["host"]}


def own_address() -> str:
    """Return the address of this node by which Ray's other nodes reach it."""
    own_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own_id)


def _fitting(node: dict[str, float], resources: dict[str, float]) -> int:
    """Return how many ranks a node has resources for."""
    return int(min(node.get(name, 0.0) / count + 1e-9 for name, count in resources.items()))


def _end_of(run: Any) -> str:
    try:
        return str(ray.get(run))
    except RayError as error:
        return f"its node or its actor was lost ({type(error).__name__})"
