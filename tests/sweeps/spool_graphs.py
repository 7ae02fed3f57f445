"""Random programs over autograd with a spool: the same values, gradients and errors as without, bit by bit.

    python -m tests.sweeps.spool_graphs --count 10000
    python -m tests.sweeps.spool_graphs --first 4711 --count 1
    python -m tests.sweeps.spool_graphs --device                    # takes host memory for a device's

Ten thousand take some six minutes, so not part of the suite, which tries some fifty. Every fifth is three
programs at once, in threads of their own. Prints one line a failure and exits with 1 if there is any.
"""

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.support.spool.spool_devices import all_tensors_on_a_device
from tests.support.spool.spool_fuzz import failure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--directory", help="where the spools write; a temporary one by default")
    parser.add_argument("--device", action="store_true", help="take all tensors for a device's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a sum by several threads has no fixed order
    started = time.perf_counter()
    failures = 0
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
        all_tensors_on_a_device() if arguments.device else nullcontext(),
    ):
        for seed in range(arguments.first, arguments.first + arguments.count):
            found = failure(seed, Path(directory), thread_count=3 if seed % 5 == 0 else 1)
            if found is not None:
                failures += 1
                print(f"seed {seed}: {found}", flush=True)
    print(f"{arguments.count} programs, {failures} failures, {time.perf_counter() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
