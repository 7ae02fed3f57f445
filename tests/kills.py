"""SIGKILL at random moments of a server that does everything at once.

    python -m tests.kills --kills 200 --seed 1

Callers extract (eagerly, and merged with others), run streams, step with a spool, save, export, publish, fit
from a data set, store edits and upload, all against one server, which is killed a random time after something
that one of them begins or ends, or while it starts. After each kill, on the same data directory:

- no file that has its final name is torn: seals and hashes are computed again, without the server's code;
- the next server removes everything that belongs to nobody, and there is no file that it does not know;
- checkpoints, published models, edits and data sets that were acknowledged are there;
- trainers and fits go on bit-equal to plain torch, and extractions answer as before, bit by bit.

The exit code is 1 when something of this did not hold.
"""

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.killing.audit import Mark, leftovers, remaining, torn
from tests.support.killing.looking import COMPILED, MERGED, SHAPE, Extracting, Streaming
from tests.support.killing.moments import random_delay_s
from tests.support.killing.storing import Editing, Uploading
from tests.support.killing.training import Fitting, Stepping
from tests.support.killing.world import Caller, World
from tests.support.models.tiny_models import Plain
from tests.support.oracles.tiny_training import MODELS as TRAINED
from tests.support.servers.server_processes import ServerProcess, ServerProcesses, server_processes
from tests.support.servers.serving import custom

SETTINGS: dict[str, Any] = {
    "models": {
        **TRAINED,
        "plain": custom(Plain, SHAPE, replicas=2),
        "merged": custom(Plain, SHAPE, numerics="fast"),
    },
    "engine": {"compile_after": 1, "openvino": False, "min_gain": 0.0},
    "grace_s": 20.0,
}
_KINDS = (
    *("extract", "merged 1", "stream", "create", "step", "save", "export", "publish", "unpublish", "close"),
    *("begin fit", "fit's step", "fit's finished", "upload", "delete dataset", "store edits", "delete edits"),
)
_EVENTS = (*(f"{kind} {end}" for kind in _KINDS for end in ("begins", "ended")), COMPILED, MERGED)
_SLOW = {COMPILED: 20.0, MERGED: 20.0}
"""Seconds for events that come late in the life of a server: a form has to be built first."""
_WAIT_S = 2.0
"""For all others."""
_AT_START, _LONGEST_START_S, _MOST_TIMES = 0.15, 0.6, 3
_TOLD_EVERY = 20
_MOST_LOGGED = 10_000


@dataclass
class Outcome:
    """What became of it."""

    kills: Counter[str] = field(default_factory=Counter)
    """By what they came after."""
    calls: Counter[str] = field(default_factory=Counter)
    """By caller."""
    acknowledged: Counter[str] = field(default_factory=Counter)
    """Changes that were acknowledged, by caller."""
    removed: int = 0
    """Files and folders that killed servers left, and the next ones removed."""
    wrong: list[str] = field(default_factory=list)
    """What did not hold."""
    exit_code: int = -1
    """Of the last server, which was stopped."""
    logged: str = ""
    """What the servers logged, from their first error; empty where everything held."""

    @property
    def is_well(self) -> bool:
        """Whether everything held."""
        return not self.wrong and self.exit_code == 0

    def __str__(self) -> str:
        lines = [f"{self.kills.total()} kills:"]
        lines += [f"  {count:4} after: {event}" for event, count in sorted(self.kills.items())]
        lines += [f"work done: {_listed(self.calls)}", f"acknowledged changes: {_listed(self.acknowledged)}"]
        lines += [f"leftovers of killed servers, all removed: {self.removed}"] if not self.wrong else []
        lines += [f"exit code of the last server: {self.exit_code}"]
        lines += [f"WRONG: {problem}" for problem in self.wrong[:20]]
        lines += [self.logged] if self.logged else []
        return "\n".join([*lines, "all is well" if self.is_well else "NOT well"])


class Killing:
    """Runs servers on one data directory, and kills them.

    Args:
        processes: Starts servers.
        folder: For the data directory, and what callers download.
        seed: Of all choices.
    """

    def __init__(self, processes: ServerProcesses, folder: Path, seed: int) -> None:
        self._processes = processes
        self._data_dir, self._temporary = folder / "data", folder / "temporary"
        self._chance, self._world, self.outcome = random.Random(seed), World(), Outcome()
        moments = self._world.moments
        (folder / "steps").mkdir()
        (folder / "fits").mkdir()
        self._storing = (
            Stepping(moments, seed, folder / "steps"),
            Fitting(moments, folder / "fits"),
            Editing(moments, seed),
            Uploading(moments, seed),
        )
        self._callers: tuple[Caller, ...] = (
            *self._storing,
            Extracting("extract", moments, "plain", True, seed),
            *(Extracting(f"merged {n}", moments, "merged", False, seed + n) for n in (1, 2, 3)),
            Streaming("stream", moments, "plain", True, seed),
        )

    def run(self, kills: int) -> Outcome:
        """Kill so often, then stop the last server; ends early where something is wrong."""
        threads = [threading.Thread(target=self._world.run, args=(caller,)) for caller in self._callers]
        for thread in threads:
            thread.start()
        server = self._started({})
        try:
            while self.outcome.kills.total() < kills and not self._is_wrong():
                server = self._killed(server)
                if self.outcome.kills.total() % _TOLD_EVERY == 0:
                    print(f"{self.outcome.kills.total()} kills", flush=True)
            self._stop(server)
        finally:
            self._world.end()
            for thread in threads:
                thread.join()
        self._tell()
        return self.outcome

    def _killed(self, server: ServerProcess) -> ServerProcess:
        """Let callers work, kill the server after a random event, and start the next one."""
        self._world.open(server.address)
        event = self._chance.choice(_EVENTS)
        times, longest_s = self._chance.randint(1, _MOST_TIMES), _SLOW.get(event, _WAIT_S)
        if not self._world.moments.wait_for(event, times, longest_s):
            event = f"{longest_s:g} s of work"
        threading.Event().wait(random_delay_s(self._chance))  # the moment is what varies
        self._world.close()
        server.kill()
        self.outcome.kills[event] += 1
        self._world.wait_until_idle()
        dead = self._audited()
        while self._chance.random() < _AT_START:
            after_s = self._chance.random() * _LONGEST_START_S
            is_early = self._processes.killed_while_starting(self._data_dir, after_s, **SETTINGS)
            self.outcome.kills["a start began" if is_early else "a start ended"] += 1
            dead |= self._audited()
        return self._started(dead)

    def _started(self, dead: dict[Path, Mark]) -> ServerProcess:
        """Start a server, and look whether all is there and nothing else."""
        server = self._processes.start(self._data_dir, **SETTINGS)
        still_there = remaining(dead)
        self.outcome.wrong += [f"a leftover is still there: {name}" for name in still_there]
        self.outcome.removed += len(dead)
        for caller in self._callers if self.outcome.kills else ():
            self._world.check(caller, server.address)
        return server

    def _audited(self) -> dict[Path, Mark]:
        """Look at the files of a dead server; returns those that have to go."""
        self.outcome.wrong += [f"torn: {problem}" for problem in torn(self._data_dir)]
        return leftovers(self._data_dir, self._temporary)

    def _stop(self, server: ServerProcess) -> None:
        """Stop the last server while callers work: it leaves nothing that belongs to nobody."""
        self._world.open(server.address)
        self._world.moments.wait_for("step ended", 1, _WAIT_S)
        self._world.close()
        self.outcome.exit_code = server.terminate()
        self._world.wait_until_idle()
        if not self._is_wrong():
            self.outcome.wrong += [f"left by a stopped server: {name}" for name in self._audited()]

    def _is_wrong(self) -> bool:
        return bool(self.outcome.wrong or self._world.wrong)

    def _tell(self) -> None:
        self.outcome.wrong += self._world.wrong
        if self.outcome.wrong:
            _, head, after = self._data_dir.with_suffix(".log").read_text().partition("[error")
            self.outcome.logged = (head + after)[:_MOST_LOGGED]
        self.outcome.calls += self._world.done
        self.outcome.calls += Counter({one: self._world.moments.counts[one] for one in (COMPILED, MERGED)})
        self.outcome.acknowledged += Counter({one.name: one.acknowledged for one in self._storing})


def kill(kills: int, seed: int, folder: Path) -> Outcome:
    """Kill a server so often, in a folder of its own."""
    temporary = folder / "temporary"
    temporary.mkdir()
    with server_processes(temporary) as processes:
        return Killing(processes, folder, seed).run(kills)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print a summary; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill(chosen.kills, chosen.seed, Path(folder))
    print(outcome)
    return 0 if outcome.is_well else 1


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
