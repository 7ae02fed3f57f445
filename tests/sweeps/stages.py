"""The stages of every torchvision model: each must stand for exactly one tensor.

    python -m tests.sweeps.stages
    python -m tests.sweeps.stages --models resnet50 vit_b_16

A minute or two, so not part of the suite, which tries one model a family. On the meta device, but for
detection, which needs data. Prints the shapes, one line a model, and exits with 1 if any fails.
"""

import argparse
import gc
import sys
import time

from torchvision.models import list_models

from tests.support.models.stages import recorded_by_name, stage_leaves
from trocar_server.models.stages import stages_of


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list_models(), help="names; all by default")
    names = parser.parse_args().models
    failures = [name for name in names if not _check(name)]
    print(f"{len(names) - len(failures)} of {len(names)} models are right; failed: {failures or 'none'}")
    return 1 if failures else 0


def _check(name: str) -> bool:
    started = time.perf_counter()
    try:
        leaves = stage_leaves(recorded_by_name(name)) if stages_of(name) else {}
        outcome = ", ".join(f"{stage} {leaf.shape}" for stage, leaf in leaves.items()) or "has none"
    except Exception as error:  # noqa: BLE001 - one model's failure is a line of the report
        outcome = f"FAILED {type(error).__name__}: {error}"
    gc.collect()
    print(f"{name:<40} {time.perf_counter() - started:7.1f} s  {outcome}", flush=True)
    return not outcome.startswith("FAILED")


if __name__ == "__main__":
    sys.exit(main())
