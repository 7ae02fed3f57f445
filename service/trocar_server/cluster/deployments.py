"""Deployments of Ray Serve: replicas of a model, and gateways.

    run_target(model_id, config, placement)       # for `serve.run_many`

The replicas of Serve are supervisors: the server, or the gateway, is a child process of each. They do not
import torch.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from trocar_server.cluster.child_process import ChildFailedError, ChildProcess, Line
from trocar_server.cluster.cluster_key import cluster_key
from trocar_server.cluster.directory import open_directory
from trocar_server.cluster.members import WAIT
from trocar_server.cluster.ranks.rank_placement import RankPlacement, at_address, own_address, rank_resources
from trocar_server.cluster.scaling import METRIC
from trocar_server.config import PlacementConfig, ServerConfig

APP_PREFIX = "trocar-"
GATEWAY_APP = "trocar"
_MAX_NODES = 4096
_START_ATTEMPTS = 1_000_000
"""After so many failures in a row Ray Serve (2.60) never starts a replica again, until the next deployment.

A controller that was itself restarted counts replicas that it no longer finds as failures, too.
"""
_EACH = "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"
CONTROLLER_OPTIONS = {"runtime_env": {"env_vars": {_EACH: str(_START_ATTEMPTS)}}}
"""The same, for each replica of a deployment; the smaller limit counts."""
_REPORT_S = 5.0
_STATE_S = 5.0
"""The longest wait for the directory's reports; then they are asked for again."""
_PUSH_EVERY_S = 0.25
_TELL_EVERY_S = 0.5
_JOIN_EVERY_S = 0.25
_HEALTH_PERIOD_S = 1.0
_HEALTH_TIMEOUT_S = 30.0
_STOP_S = 10.0
"""Seconds for a stop, besides those in which calls may end."""


class ReplicaSupervisor:
    """One replica of a model: starts a complete server, and reports its load.

    Args:
        model_id: The model.
        config: The server's settings, as of `ServerConfig`; `host` is the node's address where it is missing.
        drain_s: The longest wait for running calls before it stops, in seconds.
        grace_s: Seconds for a stop after that.
        resources: Resources of Ray that each worker of its fits takes, as `RankPlacement` wants them.
        start_timeout_s: Seconds to wait for these.
    """

    def __init__(
        self,
        model_id: str,
        config: Line,
        drain_s: float,
        grace_s: float,
        resources: dict[str, float],
        start_timeout_s: float,
    ) -> None:
        self._stop_s = drain_s + grace_s + _STOP_S
        self._waiting_s = 0.0
        self._version = version_of(model_id, config)
        self._identity: Line = {}
        self._refusal = ""
        self._directory = open_directory()
        context = ray.get_runtime_context()
        self._report: Line = {
            "replica_id": context.get_actor_id(),
            "node_id": context.get_node_id(),
            "model_id": model_id,
            "waiting_s": 0.0,
            "call_count": 0,
            "is_draining": False,
        }
        settings = {
            "model_id": model_id,
            "replica_id": self._report["replica_id"],
            "key": cluster_key(Path(config["data_dir"])),
            "drain_s": drain_s,
            "holder": ray.get(self._directory.holder.remote()),
            "config": at_address(own_address(), config),
        }
        self._ranks = RankPlacement(config, resources, start_timeout_s, self._tell_of_ranks)
        self._child = ChildProcess("trocar_server.cluster.replica_server", settings, self._take, self._forget)
        self._ranks.start()
        _ready_address(self._child, self._directory, APP_PREFIX + model_id)
        self._join()
        self._stopping = Event()
        self._teller = Thread(target=self._tell, name="replicas-of-model", daemon=True)
        self._teller.start()

    def check_health(self) -> None:
        """Fail if the server has ended; Ray Serve then starts another replica."""
        if not self._child.is_alive:
            raise RuntimeError(self._refusal or self._child.problem)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the seconds of admitted work that is not done."""
        return {METRIC: self._waiting_s}

    def __del__(self) -> None:
        """Drain and stop the server."""
        if hasattr(self, "_stopping"):
            self._stopping.set()
            self._teller.join(1.0)
        child = getattr(self, "_child", None)
        if child is not None:
            child.stop(self._stop_s)
        if hasattr(self, "_ranks"):
            self._ranks.close()

    def _join(self) -> None:
        """Wait until this replica may serve; see Note: [Replicas agree].

        Raises:
            ChildFailedError: It differs from the others, or has ended.
        """
        while (answer := self._asked_to_join(is_known=False)) == WAIT:
            if not self._child.is_alive:
                raise ChildFailedError(self._child.problem)
            time.sleep(_JOIN_EVERY_S)
        if answer:
            self._leave(answer)
            raise ChildFailedError(answer)

    def _asked_to_join(self, *, is_known: bool) -> str:
        """Return the directory's answer, or `WAIT`."""
        asked = self._directory.join.remote(dict(self._report), self._identity, self._version, is_known)
        try:
            return str(ray.get(asked, timeout=_STATE_S))
        except RayError:
            return WAIT

    def _leave(self, why: str) -> None:
        """Stop serving: this replica has other weights than those that serve."""
        self._refusal = why
        _tell_failure(self._directory, APP_PREFIX + str(self._report["model_id"]), why)
        self._child.stop(self._stop_s)

    def _tell(self) -> None:
        """Tell the server which replicas of its model there are: it takes over trainers of lost ones.

        Without the directory, or while it is new, nothing is told, and so nobody counts as lost.
        """
        while not self._stopping.wait(_TELL_EVERY_S):
            try:
                state: Any = ray.get(self._directory.state.remote(), timeout=_STATE_S)
            except RayError:
                continue
            own_id, model_id = self._report["replica_id"], self._report["model_id"]
            replicas = {
                report["replica_id"]: not report["is_draining"]
                for report in state["replicas"]
                if report["model_id"] == model_id
            }
            if own_id not in replicas:
                answer = self._asked_to_join(is_known=True)
                if answer not in ("", WAIT):
                    self._leave(answer)
                    return
            elif not state["is_new"]:
                refused = state["refused"].get(model_id, "")
                self._child.send({"replicas": replicas, "refused": refused})

    def _tell_of_ranks(self, line: Line) -> None:
        self._child.send(line)

    def _take(self, line: Line) -> None:
        if "ranks" in line:
            self._ranks.take(line["ranks"])
            return
        if "ready" in line:
            self._report["address"] = line["ready"]
            self._report |= {
                key: line[key] for key in ("client_address", "metrics_address", "slot", "process_id")
            }
            self._identity = line["identity"]
        self._report |= {key: line[key] for key in line.keys() & self._report.keys()}
        self._waiting_s = self._report["waiting_s"]
        if "address" in self._report:
            self._directory.report_replica.remote(dict(self._report))

    def _forget(self) -> None:
        self._ranks.close()
        self._directory.forget.remote(self._report["replica_id"])


class GatewaySupervisor:
    """The gateway of one node: starts it, and sends it the routing table.

    Args:
        config: The settings of its server, as of `ServerConfig`.
        drain_s: The longest wait for running calls before it stops, in seconds.
        grace_s: Seconds for a stop after that.
    """

    def __init__(self, config: Line, drain_s: float, grace_s: float) -> None:
        self._stop_s = drain_s + grace_s + _STOP_S
        self._directory = open_directory()
        context = ray.get_runtime_context()
        gateway_id = context.get_actor_id()
        state: Any = ray.get(self._directory.state.remote())
        node_address = own_address()
        taken = taken_addresses(state["gateways"], node_address, context.get_node_id())
        self._child = ChildProcess(
            "trocar_server.cluster.gateway_server",
            {"config": config, "taken": taken, "key": cluster_key(Path(config["data_dir"]))},
            lambda line: None,
        )
        bound = _ready_address(self._child, self._directory, GATEWAY_APP)
        host, _, port = bound.rpartition(":")
        self._report = {
            "gateway_id": gateway_id,
            "node_id": context.get_node_id(),
            "node_address": node_address,
            "process_id": self._child.process_id,
            "bound": bound,
            "address": f"{node_address if host in ('0.0.0.0', '[::]') else host}:{port}",
        }
        self._stopping = Event()
        self._pusher = Thread(target=self._push, name="routing-table", daemon=True)
        self._pusher.start()

    def check_health(self) -> None:
        """Fail if the gateway has ended; Ray Serve then starts another one."""
        if not self._child.is_alive:
            raise RuntimeError(self._child.problem)

    def __del__(self) -> None:
        """Let running calls end and stop the gateway."""
        if hasattr(self, "_stopping"):
            self._stopping.set()
            self._directory.forget.remote(self._report["gateway_id"])
            self._pusher.join()
            self._child.stop(self._stop_s)

    def _push(self) -> None:
        """Send the routing table four times a second.

        Without the directory, or while it is new, the last one stays in use.
        """
        while not self._stopping.wait(_PUSH_EVERY_S):
            try:
                self._directory.report_gateway.remote(self._report)
                state: Any = ray.get(self._directory.state.remote(), timeout=_STATE_S)
            except RayError:
                continue
            if not state["is_new"]:
                self._child.send({"replicas": state["replicas"], "wanted": state["wanted"]})


def _ready_address(child: ChildProcess, directory: Any, app: str) -> str:
    """Return the address of a child process once it is ready; if it ends before, tell the directory why.

    Raises:
        ChildFailedError: It ended before.
    """
    try:
        return child.wait_ready()
    except ChildFailedError as error:
        _tell_failure(directory, app, str(error))
        raise


def _tell_failure(directory: Any, app: str, why: str) -> None:
    with suppress(RayError):
        ray.get(directory.report_failure.remote(app, why), timeout=_REPORT_S)


def taken_addresses(gateways: Sequence[Line], node_address: str, node_id: str) -> list[str]:
    """Return the addresses that other gateways of this machine use, on simulated nodes.

    A gateway of the node itself has ended, though its report may still be there: its address is free.

    Args:
        gateways: The reports of all gateways.
        node_address: The address of this machine.
        node_id: The id of the node.
    """
    others = [one for one in gateways if one["node_address"] == node_address and one["node_id"] != node_id]
    return [str(other["bound"]) for other in others]


def model_target(
    model_id: str, config: ServerConfig, placement: PlacementConfig, host: str = ""
) -> "serve.RunTarget":
    """Return the application of one model; its servers listen on `host`, or on the address of their node."""
    settings = child_config(config, model_id, placement) | ({"host": host} if host else {})
    drain_s, grace_s = config.cluster.drain_s, config.grace_s
    per_node: Any = placement.max_per_node  # None, the default, is missing in Ray's annotation (2.60)
    deployment: Any = serve.deployment(
        ReplicaSupervisor,
        name=model_id,
        ray_actor_options={
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "resources": placement.resources,
        },
        max_replicas_per_node=per_node,
        max_constructor_retry_count=_START_ATTEMPTS,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s + grace_s + 2 * _STOP_S,
        autoscaling_config={
            "min_replicas": placement.min_replicas,
            "max_replicas": placement.most,
            "initial_replicas": placement.min_replicas,
            "upscale_delay_s": config.cluster.upscale_delay_s,
            "downscale_delay_s": config.cluster.downscale_delay_s,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2.0,
            "policy": {
                "policy_function": "trocar_server.cluster.scaling:ByWaitingWork",
                "policy_kwargs": {"waiting_s": placement.waiting_s},
            },
        },
    )
    resources = rank_resources(placement.cpus, placement.resources)
    # Whoever waits longer for replicas that start must not have them replaced: not part of the version.
    start_timeout_s = config.cluster.start_timeout_s
    deployment = with_version(deployment, settings, drain_s, grace_s, resources)
    app = deployment.bind(model_id, settings, drain_s, grace_s, resources, start_timeout_s)
    return serve.RunTarget(app, name=APP_PREFIX + model_id, route_prefix=None)


def gateway_target(config: ServerConfig) -> "serve.RunTarget":
    """Return the application of the gateways: one on every node."""
    settings = gateway_config(config)
    drain_s, grace_s = config.cluster.drain_s, config.grace_s
    deployment: Any = serve.deployment(
        GatewaySupervisor,
        name="gateway",
        ray_actor_options={"num_cpus": 0},
        max_replicas_per_node=1,
        max_constructor_retry_count=_START_ATTEMPTS,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s + grace_s + 2 * _STOP_S,
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": _MAX_NODES,
            "initial_replicas": sum(node["Alive"] for node in ray.nodes()),
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 10.0,
            "policy": {"policy_function": "trocar_server.cluster.scaling:one_per_node"},
        },
    )
    app = with_version(deployment, settings, drain_s, grace_s).bind(settings, drain_s, grace_s)
    return serve.RunTarget(app, name=GATEWAY_APP, route_prefix=None)


def with_version(deployment: "serve.Deployment", *arguments: Any) -> "serve.Deployment":
    """Give a deployment the version of its arguments: only with another one its replicas are replaced.

    Ray Serve (2.60) otherwise makes up a version for every `serve.run`, and changed bounds of replicas would
    replace all of them.
    """
    return deployment.options(_internal=True, version=version_of(*arguments))


def version_of(*arguments: Any) -> str:
    """Return what is equal for equal arguments."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:16]


def child_config(config: ServerConfig, model_id: str, placement: PlacementConfig) -> Line:
    """Return the settings of the server of a replica.

    It checks tokens itself. With TLS it also listens in plain text, for gateways on the private network.
    Ports are set even if to none: what is left open, the replica reads from the environment of its node,
    and a second replica there would find the ports taken.
    """
    settings: Line = config.model_dump(mode="json", exclude_unset=True, exclude={"cluster"})
    for key in ("host", "port", "metrics_host"):
        settings.pop(key, None)  # see `at_address`
    settings |= {"health_port": None, "page": {"enabled": False}}
    settings["metrics_port"] = None if config.metrics_port is None else 0  # any: a gateway reads them all
    settings["models"] = {model_id: settings["models"][model_id]}
    settings["data_dir"] = str(config.data_dir.expanduser().absolute())
    settings.setdefault("threads", max(1, int(placement.cpus)))
    cluster: dict[str, Any] = {"durable_steps": config.cluster.durable_steps}
    if config.cluster.trainers_dir is not None:
        cluster["trainers_dir"] = str(config.cluster.trainers_dir.expanduser().absolute())
    settings["cluster"] = cluster
    return settings | {"insecure": True, "strict": True}


def gateway_config(config: ServerConfig) -> Line:
    """Return the settings of a gateway: what concerns its port, and the times of a cluster."""
    settings: Line = config.model_dump(mode="json", exclude_unset=True, exclude={"models", "datasets"})
    cluster = settings.get("cluster", {})
    settings["data_dir"] = str(config.data_dir.expanduser().absolute())
    settings["cluster"] = {key: cluster[key] for key in ("hold_s", "drain_s", "direct") if key in cluster}
    return settings
