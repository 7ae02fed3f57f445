"""Directory of a cluster: a named actor of Ray that knows every replica and gateway by its last report.

    directory = open_directory()
    directory.report_replica.remote(report)
    state = ray.get(directory.state.remote())

Reports come four times a second, so an actor that Ray has restarted soon knows everything again, and says
that it is new until then; what is deployed, which nobody reports, is kept in a file of the data directory.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

NAME, NAMESPACE = "trocar-directory", "trocar"
_ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own resource of the head. Elsewhere it could be lost together with a replica, and trainers would wait
until Ray has noticed that the node is gone."""
SPEC_FILE = "cluster.json"
_FORGOTTEN_AFTER_S = 5.0
_NEW_FOR_S = 2.0
"""So long after its start it may not have had the reports of all."""


class Directory:
    """Reports by replica and by gateway.

    Args:
        data_dir: The shared folder, for the file of what is deployed.
    """

    def __init__(self, data_dir: str) -> None:
        self._path = Path(data_dir) / SPEC_FILE
        self._began_at = time.monotonic()
        self._replicas: dict[str, tuple[float, dict[str, Any]]] = {}
        self._gateways: dict[str, tuple[float, dict[str, Any]]] = {}
        self._spec: dict[str, Any] = {}
        self._failures: dict[str, tuple[int, str]] = {}
        with suppress(OSError, ValueError):
            self._spec = json.loads(self._path.read_text())

    def deploy(self, spec: dict[str, Any]) -> None:
        """Keep what is deployed: `config` and `placements` by model id."""
        self._spec = spec
        self._failures.clear()
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(spec))
        temporary.chmod(0o600)
        temporary.replace(self._path)

    def spec(self) -> dict[str, Any]:
        """Return what is deployed; empty if nothing is."""
        return self._spec

    def report_replica(self, report: dict[str, Any]) -> None:
        """Take a replica's report."""
        self._replicas[report["replica_id"]] = time.monotonic(), report

    def report_gateway(self, report: dict[str, Any]) -> None:
        """Take a gateway's report."""
        self._gateways[report["gateway_id"]] = time.monotonic(), report

    def report_failure(self, app: str, why: str) -> None:
        """Count a replica or a gateway of an application that could not start."""
        count, _ = self._failures.get(app, (0, ""))
        self._failures[app] = count + 1, why

    def forget(self, own_id: str) -> None:
        """Forget a replica or gateway that has ended."""
        self._replicas.pop(own_id, None)
        self._gateways.pop(own_id, None)

    def state(self) -> dict[str, Any]:
        """Return the last reports, whether some may be missing, and the least number of replicas by model.

        Also, by application, how many could not start since the last configuration, and why the last one.
        """
        placements = self._spec.get("placements", {})
        return {
            "replicas": _fresh(self._replicas),
            "gateways": _fresh(self._gateways),
            "wanted": {model_id: placement["min_replicas"] for model_id, placement in placements.items()},
            "failures": self._failures,
            "is_new": time.monotonic() - self._began_at < _NEW_FOR_S,
        }


def _fresh(reports: dict[str, tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    now = time.monotonic()
    for own_id, (at, _) in list(reports.items()):
        if now - at > _FORGOTTEN_AFTER_S:
            del reports[own_id]
    return [report for _, report in reports.values()]


def start_directory(data_dir: Path) -> Any:
    """Start the directory, or find the one that runs; outlives this process, and Ray restarts it."""
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor = ray.remote(Directory).options(
        num_cpus=0, resources=_ON_HEAD, max_restarts=-1, max_task_retries=3, **options
    )
    return actor.remote(str(data_dir))


def open_directory() -> Any:
    """Find the directory.

    Raises:
        ValueError: There is none: nothing is deployed on this cluster.
    """
    return ray.get_actor(NAME, namespace=NAMESPACE)
