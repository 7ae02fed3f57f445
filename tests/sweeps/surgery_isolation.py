"""A thousand mixed calls with edits and gradients, a third of which fail: nothing is left of any.

    python -m tests.sweeps.surgery_isolation
    python -m tests.sweeps.surgery_isolation --calls 10000

Edits of values and parameters, swaps, skips, gradients, penalties; wrong shapes, wrong classes, deadlines.
Weights must be bit-equal, hooks, forwards and tables of all replicas unchanged, and the number of tensors and
the memory of the process flat over the second half. A minute or more; exits with 1 where anything differs.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path

import structlog

import trocar
from tests.support.servers.footprint import live_tensor_count
from tests.support.servers.running_server import running_server
from tests.support.wire.surgical_calls import MODELS, footprint, stress

_MOST_GROWTH_MB = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    started = time.perf_counter()
    with (
        running_server(models=MODELS, device="cpu") as server,
        trocar.connect(server.address, timeout_s=60) as client,
    ):
        before, chance = footprint(server), random.Random(arguments.seed)
        outcomes = stress(client, chance, arguments.calls // 2)
        tensors, memory = live_tensor_count(), resident_mb()
        outcomes += stress(client, chance, arguments.calls - arguments.calls // 2)
        server.on_owner(lambda: None)
        is_same = footprint(server) == before
        more_tensors, more_mb = live_tensor_count() - tensors, resident_mb() - memory
    print(f"{time.perf_counter() - started:.1f} s  {dict(outcomes.most_common())}")
    print(f"unchanged: {is_same}; second half: {more_tensors:+} tensors, {more_mb:+.1f} MB")
    return 0 if is_same and more_tensors <= 5 and more_mb < _MOST_GROWTH_MB else 1


def resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
