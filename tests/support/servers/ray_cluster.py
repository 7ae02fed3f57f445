"""A Ray cluster of simulated nodes, and the commands of Trocar on it, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 100 << 20,
    "include_dashboard": False,
}
_SERVE = ("-m", "trocar_server.__main__")
_CLUSTER = ("-c", "from trocar_server.cluster.commands import cluster_app; cluster_app()")


@dataclass
class Commands:
    """Runs `trocar serve` and `trocar cluster` against a cluster."""

    address: str

    def run(self, *words: str, address: str = "") -> "subprocess.CompletedProcess[str]":
        """Run one command to its end: `("serve", "--config", FILE)`, `("status",)`."""
        command = _SERVE if words[0] == "serve" else (*_CLUSTER, words[0])
        line = [sys.executable, *command, *words[1:], "--ray", address or self.address]
        return subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)

    def done(self, *words: str) -> str:
        """Run a command that succeeds; returns its output."""
        ended = self.run(*words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def refused(self, *words: str, address: str = "") -> str:
        """Run a command that fails with one line; returns it."""
        ended = self.run(*words, address=address)
        errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert (ended.returncode, len(errors)) == (1, 1), ended.stderr
        return errors[0]

    def state(self) -> dict[str, Any]:
        """Gateways and replicas."""
        found: dict[str, Any] = json.loads(self.done("status", "--json").splitlines()[-1])
        return found


@contextmanager
def ray_nodes(count: int) -> Iterator[Commands]:
    """Start nodes of one CPU each; every process of theirs ends with the context."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=dict(_NODE))
    try:
        for _ in range(count - 1):
            cluster.add_node(**{key: value for key, value in _NODE.items() if key != "include_dashboard"})
        yield Commands(cluster.address)
    finally:
        cluster.shutdown()


def write_config(
    path: Path, models: dict[str, dict[str, Any]], placements: dict[str, str], **cluster: Any
) -> str:
    """Write a configuration file of a cluster with tokens; returns its path.

    Args:
        path: The file; the data directory is beside it.
        models: Settings by model id, of texts.
        placements: Lines of TOML by model id.
        cluster: Settings of `[cluster]`.
    """
    lines = [
        "[server]",
        "port = 0",
        "tokens = true",
        'device = "cpu"',
        f'data_dir = "{path.parent / "data"}"',
    ]
    for model_id, settings in models.items():
        lines += [f"[models.{model_id}]", *(f'{key} = "{value}"' for key, value in settings.items())]
    lines += ["[cluster]", *(f"{key} = {value}" for key, value in cluster.items())]
    for model_id, placement in placements.items():
        lines += [f"[cluster.models.{model_id}]", placement]
    path.write_text("\n".join(lines))
    return str(path)
