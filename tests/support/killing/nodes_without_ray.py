"""Nodes of a cluster without Ray: its supervisors, replicas and gateways, started again as Ray would.

with nodes_without_ray(2) as nodes:
    nodes.deploy(config)
    nodes.kill("node", random.Random(0))

The supervisors run in this process, and the directory, too; a supervisor that is killed no longer reaches the
directory. Replicas and gateways are processes. They are forks of one process that has imported torch, so that
a new one is there in a fraction of a second.
"""

import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.servers import warm_python
from trocar_server.app.server_id import server_id
from trocar_server.cluster.child_process import ChildProcess
from trocar_server.cluster.cluster_key import make_cluster_key
from trocar_server.config import ServerConfig
from trocar_server.storage.folder_lease import new_holder

_ADDRESS = "127.0.0.1"
_POLL_S, _NODE_IS_BACK_S, _FROZEN_S, _AWAKE_S = 0.1, 3.0, 10.0, 2.0
_here = threading.local()


class Handle:
    """What a supervisor has of the directory; nothing any more once its process is dead."""

    def __init__(self, nodes: "NodesWithoutRay") -> None:
        self._nodes, self.is_cut = nodes, False

    def __getattr__(self, name: str) -> Any:
        """Return a method as Ray has it: `directory.state.remote()`."""
        return SimpleNamespace(remote=lambda *arguments: self._call(name, *arguments))

    def _call(self, name: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError

        if self.is_cut:
            return RayError("killed")
        return self._nodes.ask(name, *arguments)


class Part:
    """A replica or a gateway on a node, kept alive.

    Args:
        kind: `replica` or `gateway`.
        node: The number of its node.
        handle: Makes what its supervisor has of the directory.
        make: Makes its supervisor; returns when it is ready.
    """

    def __init__(self, kind: str, node: int, handle: Callable[[], Handle], make: Callable[[], Any]) -> None:
        self.kind, self.node = kind, node
        self._new_handle, self._make = handle, make
        self._handle = handle()
        self._supervisor: Any = None
        self._is_lost, self._ends, self._goes = (threading.Event() for _ in range(3))
        self._again_at = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"{kind} of node {node}", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int:
        """Its process; 0 while there is none."""
        child = getattr(self._supervisor, "_child", None)
        return child.process_id if child is not None and child.is_alive else 0

    def cut_off(self, again_after_s: float) -> None:
        """Let its supervisor be dead, and start another one after so many seconds."""
        self._handle.is_cut = True
        self._again_at = time.monotonic() + again_after_s
        self._is_lost.set()

    def close_input(self) -> None:
        """Let its process see that its supervisor is dead."""
        assert self._supervisor is not None
        self._supervisor._child._process.stdin.close()

    def replace(self) -> None:
        """Drain and stop it, and start another one in its place, as for a new configuration."""
        self._goes.set()

    def stop(self) -> None:
        """Drain and stop it."""
        self._ends.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ends.is_set():
            self._is_lost.clear()
            self._goes.clear()
            self._handle = _here.handle = self._new_handle()
            _here.node = self.node
            self._supervisor = self._make()
            ends = (self._ends, self._is_lost, self._goes)
            while not (any(event.is_set() for event in ends) or self._is_dead()):
                self._ends.wait(_POLL_S)
            if self._is_lost.is_set():
                self._supervisor._stopping.set()
                self._ends.wait(max(0.0, self._again_at - time.monotonic()))
            else:
                self._supervisor.__del__()
        self._supervisor = None

    def _is_dead(self) -> bool:
        try:
            self._supervisor.check_health()
        except RuntimeError:
            return True
        return False


class NodesWithoutRay:
    """Nodes, each with a gateway, and replicas on all but the first.

    Args:
        count: The number of nodes besides the first.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[Part] = []
        self._asking = threading.Lock()
        self._directory: Any = None
        self._data_dir = ""
        self._holder: dict[str, Any] = {}
        self._more: list[Part] = []
        self._makers: list[Callable[[], Any]] = []
        self._under_way: list[threading.Thread] = []
        self._orphans: list[int] = []
        self._kills: dict[str, Callable[[list[Part], random.Random], int]] = {
            "replica": self._kill_one,
            "supervisor of a replica": self._kill_supervisor,
            "gateway": self._kill_one,
            "supervisor of a gateway": self._kill_supervisor,
            "node": self._kill_node,
            "frozen node": self._freeze_node,
            "directory": lambda parts, chance: self._restart_directory(),
            "replaced replica": self._replace_one,
            "one more, or less, replica": self._scale,
        }

    @property
    def kinds(self) -> list[str]:
        """What can be killed."""
        return list(self._kills)

    def deploy(self, config: ServerConfig) -> None:
        """Start every replica and gateway."""
        from trocar_server.cluster import deploying, deployments
        from trocar_server.cluster.directory import Directory
        from trocar_server.cluster.ranks.rank_placement import rank_resources

        self._data_dir = str(config.data_dir)
        config.data_dir.mkdir()
        server_id(config.data_dir)
        make_cluster_key(config.data_dir)
        self._holder = asdict(new_holder(uuid.uuid4().hex, _ADDRESS))
        self._directory = Directory(self._data_dir, self._holder)
        assert not self._directory.claim([str(folder) for folder in config.cluster_folders])
        self._directory.deploy(deploying._spec(config, _ADDRESS))
        drain_s, grace_s = config.cluster.drain_s, config.grace_s
        for model_id, place in deploying.placements(config).items():
            own = deployments.child_config(config, model_id, place) | {"host": _ADDRESS}
            resources = rank_resources(place.cpus, place.resources)
            start_s = config.cluster.start_timeout_s
            replica = partial(
                deployments.ReplicaSupervisor, model_id, own, drain_s, grace_s, resources, start_s
            )

            self._makers.append(replica)
            for number in range(place.min_replicas):
                self._add("replica", 1 + number % self._count, replica)
        settings = deployments.gateway_config(config)
        for node in range(self._count + 1):
            self._add("gateway", node, lambda: deployments.GatewaySupervisor(settings, drain_s, grace_s))

    def _add(self, kind: str, node: int, make: Callable[[], Any]) -> None:
        self._parts.append(Part(kind, node, lambda: Handle(self), make))

    def kill(self, kind: str, chance: random.Random) -> int:
        """Kill one of a kind, each of its processes with SIGKILL; returns the number of what was killed."""
        return self._kills[kind](
            [part for part in self._parts if part.kind == kind.rpartition(" ")[2]], chance
        )

    def repair(self) -> None:
        """Nothing: what was killed comes back by itself."""

    def state(self) -> dict[str, Any]:
        """Return what the directory knows."""
        state: dict[str, Any] = self.ask("state")
        return state

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the directory, one at a time as an actor does."""
        with self._asking:
            return getattr(self._directory, name)(*arguments)

    def end(self) -> None:
        """Drain and stop every part."""
        for thread in self._under_way:
            thread.join()
        for part in self._parts:
            part._ends.set()
        for part in self._parts:
            part.stop()
        for process in self._orphans:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _kill_one(self, parts: list[Part], chance: random.Random) -> int:
        return _signal([chance.choice(parts)], signal.SIGKILL)

    def _kill_supervisor(self, parts: list[Part], chance: random.Random) -> int:
        part = chance.choice(parts)
        if not part.process_id:
            return 0
        self._orphans.append(part.process_id)
        part.cut_off(0.0)
        part.close_input()
        return 1

    def _replace_one(self, parts: list[Part], chance: random.Random) -> int:
        chance.choice(parts).replace()
        return 1

    def _scale(self, parts: list[Part], chance: random.Random) -> int:
        """Add a replica of some model; the next time it is removed."""
        if self._more:
            part = self._more.pop()
            self._parts.remove(part)
            self._under_way.append(threading.Thread(target=part.stop))
            self._under_way[-1].start()
        else:
            self._add("replica", chance.randint(1, self._count), chance.choice(self._makers))
            self._more.append(self._parts[-1])
        return 1

    def _node(self, chance: random.Random) -> list[Part]:
        node = chance.randint(1, self._count)
        return [part for part in self._parts if part.node == node]

    def _kill_node(self, parts: list[Part], chance: random.Random) -> int:
        victims = self._node(chance)
        processes = [part.process_id for part in victims]
        for part in victims:
            part.cut_off(_NODE_IS_BACK_S)
        return _signal_all(processes, signal.SIGKILL)

    def _freeze_node(self, parts: list[Part], chance: random.Random) -> int:
        """Stop everything on a node, as if its network were gone; it wakes up later, and is killed then."""
        victims = self._node(chance)
        processes = [part.process_id for part in victims]
        count = _signal_all(processes, signal.SIGSTOP)
        for part in victims:
            part.cut_off(_NODE_IS_BACK_S)
        frozen_s = _FROZEN_S * (1 + chance.random())

        def thaw() -> None:
            threading.Event().wait(frozen_s)
            _signal_all(processes, signal.SIGCONT)
            threading.Event().wait(_AWAKE_S)
            _signal_all(processes, signal.SIGKILL)

        self._under_way.append(threading.Thread(target=thaw))
        self._under_way[-1].start()
        return count

    def _restart_directory(self) -> int:
        from trocar_server.cluster.directory import Directory

        with self._asking:
            self._directory = Directory(self._data_dir, self._holder)
        return 1


@contextmanager
def nodes_without_ray(count: int) -> Iterator[NodesWithoutRay]:
    """Start nodes; every process of theirs ends with the context."""
    from ray.exceptions import RayError

    from trocar_server.cluster import deployments
    from trocar_server.cluster.ranks import rank_placement

    nodes = NodesWithoutRay(count)

    def get(value: Any, timeout: float | None = None) -> Any:
        if isinstance(value, RayError):
            raise value
        return value

    def context() -> Any:
        actor, node = uuid.uuid4().hex, f"node {_here.node}"
        return SimpleNamespace(get_actor_id=lambda: actor, get_node_id=lambda: node)

    def known() -> list[dict[str, str]]:
        return [{"NodeID": f"node {number}", "NodeManagerAddress": _ADDRESS} for number in range(count + 1)]

    with pytest.MonkeyPatch.context() as patch:
        for module in (deployments, rank_placement):
            patch.setattr(module, "ray", SimpleNamespace(get=get, get_runtime_context=context, nodes=known))
        patch.setattr(deployments, "open_directory", lambda: _here.handle)
        patch.setattr(ChildProcess, "starts", warm_python.Popen)
        patch.setenv(warm_python.ALSO, "torch._dynamo torchmetrics")  # as first steps and fits do
        try:
            yield nodes
        finally:
            nodes.end()
            warm_python.close()


def _signal(parts: list[Part], number: int) -> int:
    return _signal_all([part.process_id for part in parts], number)


def _signal_all(processes: list[int], number: int) -> int:
    count = 0
    for process in processes:
        if process:
            with suppress(ProcessLookupError):
                os.kill(process, number)
                count += 1
    return count
