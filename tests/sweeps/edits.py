"""Every operation at every value of four models: equal to the same change by hand, or refused for its reason.

    python -m tests.sweeps.edits
    python -m tests.sweeps.edits --models resnet18 --count 500

Values, inputs, parameters and the gradients of all of them. After each edit a plain pass must be bit-equal to
the first. Minutes to an hour, so not part of the suite, which tries a few hundred at random. Prints a line a
model, and exits with 1 if any value is wrong, any refusal is not the edit's own, or anything is left behind.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import structlog

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.wire.every_edit import PORTS, Hand, Place, cases, outcome, places

MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"weights": "random:0"},
    "vit_b_16": {"factory": "tests.support.wire.every_edit:small_vit", "weights": "random:0"},
    "swin_t": {"weights": "random:0"},
    "mobilenet_v3_small": {"weights": "random:0"},
}
SIDE = 64
"""Of the images; swin_t and the others take any size, the vit is built for this one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names; all of the list by default")
    parser.add_argument(
        "--count", type=int, default=0, help="of edits to try per model, at random; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    failed = [name for name in arguments.models if not check(name, arguments.count, arguments.seed)]
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


def check(name: str, count: int, seed: int) -> bool:
    """Try edits of one model, and print how they went."""
    started = time.perf_counter()
    with (
        running_server(models={name: hosted(name)}, device="cpu") as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        hooks = hook_counts(server)
        outcomes, wrong = tried(server, client, name, count, seed)
        wrong += [] if hook_counts(server) == hooks else ["hooks are left"]
    seconds = time.perf_counter() - started
    print(f"{name:<20} {seconds:7.1f} s  {dict(outcomes.most_common())}", flush=True)
    for text in wrong[:40]:
        print(f"  {text}", flush=True)
    return not wrong


def hosted(name: str) -> dict[str, Any]:
    """Return a model's configuration."""
    return {**MODELS[name], "input_shape": (3, SIDE, SIDE)}


def tried(
    server: RunningServer, client: trocar.Client, name: str, count: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Return how so many edits went (0: all), counted, and what was wrong."""
    batch, other = noise(2, 3, SIDE, SIDE), noise(2, 3, SIDE, SIDE, seed=1)
    model: Any = server.engine.deployment(name).hosted.module
    hand = Hand(model, batch, other)
    before = client.extract(name, batch, "/out")["/out"]
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for place, operation in chosen(places(client, name, batch.shape), count, seed):
        found = outcome(client, name, hand, place, operation, batch, other)
        outcomes[found.partition(" '")[0][:60]] += 1
        if found.startswith("WRONG"):
            wrong.append(f"{operation} at {place.name} {place.shape}: {found}")
        if not np.array_equal(client.extract(name, batch, "/out")["/out"], before):
            wrong.append(f"{operation} at {place.name}: the next pass is another")
    return outcomes, wrong


def chosen(found: list[Place], count: int, seed: int) -> list[tuple[Place, str]]:
    """Return so many cases (0: all), at random but as many at each kind of port."""
    chance = random.Random(seed)
    every = list(cases(found))
    if not count:
        return every
    picked = []
    for port in PORTS:
        own = [case for case in every if case[0].port == port]
        picked += chance.sample(own, min(len(own), count // len(PORTS)))
    return picked


if __name__ == "__main__":
    sys.exit(main())
