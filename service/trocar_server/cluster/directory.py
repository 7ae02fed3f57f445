"""Directory of a cluster: a named actor of Ray that knows every replica and gateway by its last report.

    directory = open_directory()
    directory.report_replica.remote(report)
    state = ray.get(directory.state.remote())

Reports come four times a second, so an actor that Ray has restarted soon knows everything again, and says
that it is new until then; what is deployed, which nobody reports, is kept in a file of the data directory.
"""

import json
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from trocar_server.cluster.members import FORGOTTEN_AFTER_S, Members
from trocar_server.errors import ServiceError
from trocar_server.storage.data_lock import FolderLock
from trocar_server.storage.durable import write_durably
from trocar_server.storage.folder_lease import Holder, new_holder, take_lease

NAME, NAMESPACE = "trocar-directory", "trocar"
_ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own resource of the head. Elsewhere it could be lost together with a replica, and trainers would wait
until Ray has noticed that the node is gone."""
SPEC_FILE = "cluster.json"


class Directory:
    """Replicas that may serve, and gateways, by their reports.

    Args:
        data_dir: The shared folder, for the file of what is deployed.
        holder: This cluster, as the fields of `Holder`; the same when Ray starts the directory again. A new
            one when None.
    """

    def __init__(self, data_dir: str, holder: dict[str, Any] | None = None) -> None:
        self._path = Path(data_dir) / SPEC_FILE
        self._holder = new_holder(uuid.uuid4().hex, "") if holder is None else Holder(**holder)
        self._leases: dict[str, FolderLock] = {}
        self._members = Members(time.monotonic)
        self._gateways: dict[str, tuple[float, dict[str, Any]]] = {}
        self._spec: dict[str, Any] = {}
        self._failures: dict[str, tuple[int, str]] = {}
        with suppress(OSError, ValueError):
            self._spec = json.loads(self._path.read_text())
        if self._spec.get("holder") == self._holder.cluster_id:  # Ray has started the directory again
            self.claim(self._spec["folders"])

    def claim(self, folders: list[str]) -> str:
        """Take the leases of the folders for this cluster; see Note: [Lease of a folder].

        Returns:
            Nothing, or why that is refused; then no more are held than before.
        """
        taken: dict[str, FolderLock] = {}
        try:
            for folder in folders:
                if folder not in self._leases:
                    taken[folder] = take_lease(Path(folder), self._holder)
        except ServiceError as error:
            for lease in taken.values():
                lease.release()
            return error.message
        self._leases |= taken
        return ""

    def holder(self) -> dict[str, Any]:
        """Return this cluster, as the fields of `Holder`."""
        return asdict(self._holder)

    def deploy(self, spec: dict[str, Any]) -> None:
        """Keep what is deployed: `config`, and `placements` by model id."""
        self._spec = spec
        self._failures.clear()
        self._members.begin_anew()
        kept = {**spec, "holder": self._holder.cluster_id, "folders": list(self._leases)}
        write_durably(self._path, json.dumps(kept).encode())

    def spec(self) -> dict[str, Any]:
        """Return what is deployed; empty if nothing is."""
        return self._spec

    def join(
        self, report: dict[str, Any], identity: dict[str, Any], version: str, is_known: bool = False
    ) -> str:
        """Admit a replica, or say why not; see `Members.join`."""
        return self._members.join(report, identity, version, is_known=is_known)

    def report_replica(self, report: dict[str, Any]) -> None:
        """Take the report of a replica that has joined."""
        self._members.report(report)

    def report_gateway(self, report: dict[str, Any]) -> None:
        """Take a gateway's report."""
        self._gateways[report["gateway_id"]] = time.monotonic(), report

    def report_failure(self, app: str, why: str) -> None:
        """Count a replica or a gateway of an application that could not start."""
        count, _ = self._failures.get(app, (0, ""))
        self._failures[app] = count + 1, why

    def forget(self, own_id: str) -> None:
        """Forget a replica or gateway that has ended."""
        self._members.forget(own_id)
        self._gateways.pop(own_id, None)

    def state(self) -> dict[str, Any]:
        """Return the last reports, whether some may be missing, and the least number of replicas by model.

        Also, by application, how many could not start since the last configuration, and why the last one;
        and by model, why the last replica that differs from the others was refused.
        """
        placements = self._spec.get("placements", {})
        return {
            "replicas": self._members.reports(),
            "gateways": _fresh(self._gateways),
            "wanted": {model_id: placement["min_replicas"] for model_id, placement in placements.items()},
            "failures": self._failures,
            "refused": self._members.refused(),
            "is_new": self._members.is_new,
        }


def _fresh(reports: dict[str, tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    now = time.monotonic()
    for own_id, (at, _) in list(reports.items()):
        if now - at > FORGOTTEN_AFTER_S:
            del reports[own_id]
    return [report for _, report in reports.values()]


def start_directory(data_dir: Path) -> Any:
    """Start the directory, or find the one that runs; outlives this process, and Ray restarts it."""
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor = ray.remote(Directory).options(
        num_cpus=0, resources=_ON_HEAD, max_restarts=-1, max_task_retries=3, **options
    )
    holder = new_holder(uuid.uuid4().hex, ray.get_runtime_context().gcs_address)
    return actor.remote(str(data_dir), asdict(holder))


def open_directory() -> Any:
    """Find the directory.

    Raises:
        ValueError: There is none: nothing is deployed on this cluster.
    """
    return ray.get_actor(NAME, namespace=NAMESPACE)
