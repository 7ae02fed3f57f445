"""A Ray cluster of simulated nodes, and the commands of Trocar on it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}


@contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """Start nodes of one CPU each, and connect to them; every process of theirs ends with the context.

    Args:
        count: The number of nodes.

    Yields:
        The address of the cluster.
    """
    with ray_cluster(count) as cluster:
        yield str(cluster.address)


@contextmanager
def ray_cluster(count: int) -> Iterator[Any]:
    """As `ray_nodes`; yields Ray's `Cluster`, to which `add_node` adds a node."""
    from ray.cluster_utils import Cluster

    from trocar_server.cluster.session import open_session

    set_up_ray()
    head = {"include_dashboard": False, **_NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count - 1):
            add_node(cluster)
        with open_session(str(cluster.address)):
            yield cluster
    finally:
        cluster.shutdown()


def set_up_ray() -> None:
    """Set what simulated nodes, and this process with them, need of Ray's settings."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in `session`
    # Who has run `trocar serve --ray local` has a token at home, which only nodes that are added would use.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def add_node(cluster: Any, **options: Any) -> Any:
    """Add a node of one CPU, with options of Ray; returns what `Cluster.remove_node` takes."""
    return cluster.add_node(**_NODE, **options)


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run `trocar serve ...` or `trocar cluster ...` in a process of its own."""
    line = [sys.executable, "-m", "trocar", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)


def write_config(
    path: Path, models: dict[str, dict[str, Any]], placements: dict[str, str], **cluster: Any
) -> Path:
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
    return path
