"""Serialisers that can run code are used at the listed places alone, between processes of ours.

Nothing that a client sent is ever read by one of them; what each place reads is said beside it.
"""

import ast
from collections.abc import Iterator

from tests.support import ROOT

_MODULES = frozenset(
    {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing", "ray"}
)
_CALLS = frozenset({"torch.load", "torch.save"})

PLACES: dict[str, set[str]] = {
    # A child process of ours builds a compiled variant: its job, through a pipe of the two.
    "trocar_server/engine/compiled/backends/builds.py": {"pickle"},
    "trocar_server/engine/compiled/backends/build_worker.py": {"pickle"},
    # `trocar admin convert` reads a checkpoint offline, with `weights_only=True`.
    "trocar_server/models/weights/convert.py": {"pickle", "torch.load"},
    # Workers of a fit on this machine: the hosted model, through a pipe of the two processes. Batches and
    # results are messages of `rank_messages`, here and between nodes.
    "trocar_server/training/fit/ranks/local_ranks.py": {
        "multiprocessing",
        "pickle",
        "torch.load",
        "torch.save",
    },
    # Connections that carry bytes: `send_bytes` and `recv_bytes`, never `send` and `recv`, which pickle.
    "trocar_server/training/fit/ranks/local_worker.py": {"multiprocessing"},
    "trocar_server/training/fit/ranks/placed_ranks.py": {"multiprocessing"},
    "trocar_server/training/fit/ranks/rank_launch.py": {"multiprocessing"},
    "trocar_server/training/fit/ranks/rank_messages.py": {"multiprocessing"},
    "trocar_server/training/fit/ranks/rank_sockets.py": {"multiprocessing"},
    "trocar_server/training/fit/ranks/rank_worker.py": {"multiprocessing"},
    # What Ray pickles between processes of the cluster: settings, reports, addresses and secrets of ranks.
    # Neither tensors nor anything of a call.
    "trocar_server/cluster/application.py": {"ray"},
    "trocar_server/cluster/commands.py": {"ray"},
    "trocar_server/cluster/deploying.py": {"ray"},
    "trocar_server/cluster/deployments.py": {"ray"},
    "trocar_server/cluster/directory.py": {"ray"},
    "trocar_server/cluster/ranks/rank_placement.py": {"ray"},
    "trocar_server/cluster/scaling.py": {"ray"},
    "trocar_server/cluster/session.py": {"ray"},
    # A client of Ray sends its own options and gets its own feature maps; see the security notes.
    "trocar/ray.py": {"ray"},
    "trocar/_export/ray_pool.py": {"ray"},
    # `trocar bench` starts processes of its own.
    "trocar/_bench/process.py": {"pickle"},
}


def test_serialisers_that_can_run_code_are_used_at_the_listed_places_alone() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("service", "client", "proto"):
        for path in (ROOT / folder).rglob("*.py"):
            if names := set(_used(ast.parse(path.read_text()))):
                found[path.relative_to(ROOT / folder).as_posix()] = names
    assert found == PLACES


def test_connections_carry_bytes() -> None:
    """`Connection.send` and `recv` pickle; of sockets, `recv` takes a number of bytes."""
    folder = ROOT / "service" / "trocar_server" / "training" / "fit"
    for path in folder.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                is_pickling = call.func.attr == "recv" and not call.args
                assert not is_pickling, f"{path.name}:{call.lineno}"


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in _CALLS:
            yield ast.unparse(node)
        yield from (module.partition(".")[0] for module in modules if module.partition(".")[0] in _MODULES)
