"""SIGKILL at random moments of the parts of a cluster that does everything at once.

    python -m tests.cluster_kills --kills 100 --seed 1

Ray runs on this machine, with simulated nodes. Callers extract, run streams, step, save, export, publish, fit
from a data set, store edits and upload, some through gateways and some directly. Meanwhile replicas, their
supervisors, gateways, whole nodes (every process at once, or the raylet alone), Ray Serve's controller and
the directory are killed a random time after something that a caller begins or ends; one kill in five is
followed by another one at once. A node that was killed is replaced by a new one. Nothing may be seen of it:

- no call fails: each is answered by another replica, or waits for a new one;
- each step of a trainer is applied once: every loss is plain torch's, bit by bit, and so are the weights;
- checkpoints, published models, edits and data sets that were acknowledged are there;
- no step of a trainer takes longer than 30 s;
- at the end no file that has its final name is torn.

The exit code is 1 when something of this did not hold. Needs about 6 GB of memory.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.killing.audit import torn_on_cluster
from tests.support.killing.looking import SHAPE, Extracting, Streaming
from tests.support.killing.moments import Moments, random_delay_s
from tests.support.killing.nodes_without_ray import NodesWithoutRay, nodes_without_ray
from tests.support.killing.simulated_nodes import SimulatedNodes, is_alive, simulated_nodes
from tests.support.killing.storing import Editing, Uploading
from tests.support.killing.through_faults import CALL_S, Counting, ThroughFaults
from tests.support.killing.training import Fitting, Stepping
from tests.support.killing.world import Caller
from tests.support.models.tiny_models import Plain
from tests.support.oracles.tiny_training import MODELS as TRAINED
from tests.support.servers.serving import custom
from trocar_server.config import ServerConfig

_KINDS = ("extract", "stream", "create", "step", "save", "publish", "begin fit", "fit's step", "upload")
_EVENTS = tuple(f"{kind} {end}" for kind in _KINDS for end in ("begins", "ended"))
_WAIT_S, _LONGEST_DELAY_S = 2.0, 0.5
_SECOND, _LONGEST_BETWEEN_S = 0.2, 3.0
_NODES, _CPUS, _TRAINERS = 2, 2, 4
BACK_WITHIN_S = 30.0
_SETTLED_WITHIN_S = 600.0


@dataclass
class Outcome:
    """What became of it."""

    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    calls: Counter[str] = field(default_factory=Counter)
    """By caller."""
    steps_s: list[float] = field(default_factory=list)
    """The longest step of a trainer after each kill, in seconds."""
    settled_s: list[float] = field(default_factory=list)
    """Seconds from each kill until everything had been replaced."""
    wrong: list[str] = field(default_factory=list)
    """What did not hold."""

    def __str__(self) -> str:
        lines = [f"{self.kills.total()} kills:"]
        lines += [f"  {count:4} of: {kind}" for kind, count in sorted(self.kills.items())]
        lines.append(f"work done: {', '.join(f'{name} {n:,}' for name, n in sorted(self.calls.items()))}")
        for what, seconds in (("longest step", self.steps_s), ("replaced", self.settled_s)):
            if seconds:
                middle, longest = sorted(seconds)[len(seconds) // 2], max(seconds)
                lines.append(f"{what} after a kill: median {middle:.1f} s, at most {longest:.1f} s")
        lines += [f"WRONG: {problem}" for problem in self.wrong[:40]]
        return "\n".join([*lines, "NOT well" if self.wrong else "all is well"])


class ClusterKilling:
    """Runs callers on a cluster, and kills its parts.

    Args:
        nodes: The cluster.
        folder: For the shared data directory, and what callers download.
        seed: Of all choices.
        back_within_s: The longest time of one step of a trainer.
    """

    def __init__(
        self,
        nodes: SimulatedNodes | NodesWithoutRay,
        folder: Path,
        seed: int,
        back_within_s: float = BACK_WITHIN_S,
    ) -> None:
        self._back_within_s = back_within_s
        self._nodes, self._data_dir = nodes, folder / "data"
        self._chance, self.outcome = random.Random(seed), Outcome()
        torch.set_num_threads(1)  # as each replica has; with others the bits of a step differ
        self._moments = moments = Moments()
        for name in ("steps", "fits"):
            (folder / name).mkdir()
        self._counting = Counting(moments, _TRAINERS)
        callers: tuple[Caller, ...] = (
            self._counting,
            Extracting("extract", moments, "plain", True, seed),
            Streaming("stream", moments, "plain", True, seed),
            Extracting("extract 2", moments, "plain", True, seed + 1),
            Stepping(moments, seed, folder / "steps"),
            Fitting(moments, folder / "fits"),
            Uploading(moments, seed),
            Editing(moments, seed),
        )
        self._gateways = ""
        self._callers = ThroughFaults(callers, self._live_gateways)

    def run(self, kills: int, kinds: Sequence[str], longest_s: float) -> Outcome:
        """Kill so often, or for so many seconds, what is of these kinds; then stop."""
        until = time.monotonic() + longest_s
        self._nodes.deploy(self._config())
        self._settle()
        with self._callers.working():
            self._callers.look()
            while self.outcome.kills.total() < kills and time.monotonic() < until:
                self._kill(kinds)
        self.outcome.calls += self._callers.done
        self._nodes.end()
        self.outcome.wrong += [f"torn: {problem}" for problem in torn_on_cluster(self._data_dir)]
        return self.outcome

    def _config(self) -> ServerConfig:
        place = {"min_replicas": 2, "max_per_node": 1, "cpus": 0.5}
        settings: dict[str, Any] = {
            "models": {**TRAINED, "plain": custom(Plain, SHAPE)},
            "cluster": {
                "models": {"tiny": place, "plain": place},
                "drain_s": 10.0,
                "start_timeout_s": 240.0,
                "hold_s": CALL_S,
            },
        }
        return ServerConfig(port=0, device="cpu", data_dir=self._data_dir, grace_s=5.0, **settings)

    def _kill(self, kinds: Sequence[str]) -> None:
        """Kill after a random event, wait until everything is replaced, and let callers look."""
        event, began = self._chance.choice(_EVENTS), time.monotonic()
        self._moments.wait_for(event, 1, _WAIT_S)
        self._counting.longest_s = 0.0
        killed = self._kill_one(kinds)
        if self._chance.random() < _SECOND:
            threading.Event().wait(_LONGEST_BETWEEN_S * self._chance.random())
            killed += f", {self._kill_one(kinds)}"
        self._settle()
        settled_s = time.monotonic() - began
        self._callers.look()
        step_s = self._counting.longest_s
        self.outcome.settled_s.append(settled_s)
        self.outcome.steps_s.append(step_s)
        if step_s > self._back_within_s:
            self.outcome.wrong.append(f"a step of a trainer took {step_s:.1f} s after: {killed}")
        new = self._callers.wrong[:]
        self._callers.wrong.clear()
        self.outcome.wrong += [f"{problem}, after: {killed}" for problem in new]
        told = f"longest step {step_s:.1f} s, replaced {settled_s:.1f} s"
        print(f"{self.outcome.kills.total()} {killed} ({event}): {told}", *new, sep="\n  ", flush=True)

    def _kill_one(self, kinds: Sequence[str]) -> str:
        kind = self._chance.choice(kinds)
        threading.Event().wait(random_delay_s(self._chance, _LONGEST_DELAY_S))  # the moment is what varies
        if self._nodes.kill(kind, self._chance):
            self.outcome.kills[kind] += 1
        return kind

    def _settle(self) -> None:
        """Replace nodes, and wait for all replicas and gateways."""
        until = time.monotonic() + _SETTLED_WITHIN_S
        while not self._is_settled():
            self._nodes.repair()  # again and again: a killed raylet may still have been ending a moment ago
            if time.monotonic() > until:
                self.outcome.wrong.append(f"not replaced: {self._nodes.state()}")
                return
            threading.Event().wait(0.25)
        found = sorted(report["address"] for report in self._nodes.state()["gateways"])
        self._gateways = ",".join(found) or self._gateways

    def _live_gateways(self) -> str:
        """Return the addresses of the gateways, as of the last time that everything was there.

        Nobody tells callers of new ones amid an outage: one on the head always comes back to its address.
        """
        return self._gateways

    def _is_settled(self) -> bool:
        state: dict[str, Any] = self._nodes.state()
        gateways = [report for report in state["gateways"] if is_alive(report["process_id"])]
        serving = Counter(report["model_id"] for report in state["replicas"] if not report["is_draining"])
        return len(gateways) == _NODES + 1 and min(serving["tiny"], serving["plain"]) >= 2


def kill(
    kills: int,
    seed: int,
    folder: Path,
    kinds: Sequence[str] = (),
    longest_s: float = float("inf"),
    *,
    with_ray: bool = True,
    back_within_s: float = BACK_WITHIN_S,
) -> Outcome:
    """Kill parts of a cluster so often, in a folder of its own."""
    with simulated_nodes(_NODES, _CPUS) if with_ray else nodes_without_ray(_NODES) as nodes:
        return ClusterKilling(nodes, folder, seed, back_within_s).run(kills, kinds or nodes.kinds, longest_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print a summary; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster_kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="What to kill; everything by default.")
    parser.add_argument("--without-ray", action="store_true", help="Replace parts as Ray would.")
    parser.add_argument("--back-within", type=float, default=BACK_WITHIN_S, help="Seconds of a step.")
    parser.add_argument("--longest", type=float, default=float("inf"), help="Seconds after which to end.")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        given = (chosen.kills, chosen.seed, Path(folder), chosen.only, chosen.longest)
        outcome = kill(*given, with_ray=not chosen.without_ray, back_within_s=chosen.back_within)
    print(outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
