"""Simulated nodes of a Ray cluster on this machine, and their processes, to be killed.

with simulated_nodes(2, cpus=2) as nodes:
    nodes.kill("replica", random.Random(0))
    nodes.repair()                              # a node that was killed is replaced by a new one
"""

import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.servers.ray_cluster import set_up_ray
from trocar_server.config import ServerConfig

_NODE: dict[str, Any] = {"object_store_memory": 100 << 20}
_CONTROLLER, _DIRECTORY = b"ray::ServeController", b"ray::Directory"


class SimulatedNodes:
    """A head without replicas, and nodes for them.

    Args:
        count: The number of nodes besides the head.
        cpus: CPUs of each, as far as Ray is concerned.
    """

    def __init__(self, count: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._count, self._cpus = count, cpus
        self._killed: set[int] = set()
        set_up_ray()
        head = {"include_dashboard": False, "num_cpus": 0, **_NODE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._victims: dict[str, Callable[[random.Random], list[int]]] = {
            "replica": lambda chance: _one(chance, self.process_ids("replicas")),
            "supervisor of a replica": lambda chance: _parents(_one(chance, self.process_ids("replicas"))),
            "gateway": lambda chance: _one(chance, self.process_ids("gateways")),
            "supervisor of a gateway": lambda chance: _parents(_one(chance, self.process_ids("gateways"))),
            "raylet": self._raylet,
            "node": lambda chance: _with_children(self._raylet(chance)),
            "Serve's controller": lambda chance: self._named(_CONTROLLER),
            "directory": lambda chance: self._named(_DIRECTORY),
        }
        self.repair()

    @property
    def address(self) -> str:
        """The address of the cluster."""
        return str(self._cluster.address)

    @property
    def kinds(self) -> list[str]:
        """What can be killed."""
        return list(self._victims)

    def deploy(self, config: ServerConfig) -> None:
        """Deploy a configuration."""
        from trocar_server.cluster import deploying

        deploying.deploy(config)

    def kill(self, kind: str, chance: random.Random) -> int:
        """Kill one of a kind, each of its processes with SIGKILL; returns the number of processes."""
        victims = self._victims[kind](chance)
        self._killed.update(victims)
        for process_id in victims:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        return len(victims)

    def repair(self) -> None:
        """Remove nodes whose raylet was killed, and add new ones in their place."""
        for node in list(self._cluster.worker_nodes):
            raylet = _raylet_of(node)
            if raylet in self._killed or not is_alive(raylet):  # the end of a killed one may take a moment
                self._cluster.remove_node(node, allow_graceful=False)
        while len(self._cluster.worker_nodes) < self._count:
            self._add_node()

    def state(self) -> dict[str, Any]:
        """Return what the directory knows of parts with a supervisor; nothing while it does not answer."""
        import ray
        from ray.exceptions import RayError

        from trocar_server.cluster.directory import open_directory

        try:
            state: dict[str, Any] = ray.get(open_directory().state.remote(), timeout=20.0)
        except (RayError, ValueError):
            return {"replicas": [], "gateways": [], "wanted": {}}
        for kind in ("replicas", "gateways"):
            state[kind] = [one for one in state[kind] if self._is_living(one["process_id"])]
        return state

    def _is_living(self, process: int) -> bool:
        """Whether a process lives, the worker of Ray that started it, and the raylet that started that one.

        What was killed does not, though its end may take a moment.
        """
        worker = _parent(process)
        raylet = _parent(worker)
        is_supervised = _title(worker).startswith(b"ray::") and b"raylet" in _title(raylet)
        return is_supervised and is_alive(process) and self._killed.isdisjoint((process, worker, raylet))

    def process_ids(self, kind: str) -> list[int]:
        """Return the processes of all `replicas` or `gateways`."""
        return sorted(report["process_id"] for report in self.state()[kind])

    def end(self) -> None:
        """Drain and stop what is deployed."""
        from trocar_server.cluster import deploying

        deploying.stop()

    def stop(self) -> None:
        """Stop every node."""
        self._cluster.shutdown()

    def _add_node(self) -> None:
        """Add a node; Ray (2.60) gives up one that has not registered within 30 s, and leaves its raylet."""
        for is_last in (False, False, True):
            try:
                self._cluster.add_node(num_cpus=self._cpus, **_NODE)
            except Exception:  # Ray raises no class of its own
                if is_last:
                    raise
                known = {_raylet_of(node) for node in self._cluster.list_all_nodes()}
                for process_id in set(_with_children([os.getpid()])) - known:
                    if b"raylet/raylet" in _title(process_id):
                        os.kill(process_id, signal.SIGKILL)
            else:
                return

    def _raylet(self, chance: random.Random) -> list[int]:
        """Return the raylet of one node, never of the head: without it nobody replaces anything."""
        return _one(chance, sorted(_raylet_of(node) for node in self._cluster.worker_nodes))

    def _named(self, title: bytes) -> list[int]:
        nodes = self._cluster.list_all_nodes()
        own = [process for node in nodes for process in _with_children([_raylet_of(node)])]
        return [process for process in own if _title(process).startswith(title)]


@contextmanager
def simulated_nodes(count: int, cpus: int) -> Iterator[SimulatedNodes]:
    """Start nodes, and connect to them; every process of theirs ends with the context."""
    from trocar_server.cluster.session import open_session

    nodes = SimulatedNodes(count, cpus)
    try:
        with open_session(nodes.address):
            yield nodes
    finally:
        nodes.stop()


def _raylet_of(node: Any) -> int:
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    return int(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)


def _one(chance: random.Random, processes: list[int]) -> list[int]:
    return [chance.choice(processes)] if processes else []


def _parents(processes: Iterable[int]) -> list[int]:
    return [parent for process in processes if (parent := _parent(process)) > 1]


def _with_children(processes: list[int]) -> list[int]:
    """Return processes and everything that they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        children.setdefault(_parent(int(path.name)), []).append(int(path.name))
    found = list(processes)
    for process in found:  # grows
        found += children.get(process, ())
    return found


def _parent(process: int) -> int:
    """Return the id of a parent; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(process: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
