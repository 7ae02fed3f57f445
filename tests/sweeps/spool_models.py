"""Training steps of torchvision's models with a spool of a random budget: gradients bit-equal to plain ones.

    python -m tests.sweeps.spool_models                             # classification
    python -m tests.sweeps.spool_models --family segmentation
    python -m tests.sweeps.spool_models --models resnet50 swin_t

Minutes, so not part of the suite, which tries some small ones. Inputs as small as a model takes. Prints one
line a model and exits with 1 if any differs.
"""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torchvision.models import list_models

from tests.support.spool.spool_models import Outcome, outcome

FAMILIES = ("classification", "segmentation", "detection", "video", "optical_flow")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, default="classification")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--directory", help="where the spools write; a temporary one by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a sum by several threads has no fixed order
    names = arguments.models or names_of(arguments.family)
    outcomes = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for name in names:
            started = time.perf_counter()
            outcomes.append(_outcome(name, Path(directory)))
            said = outcomes[-1].error or outcomes[-1].skipped or "equal"
            print(
                f"{name:<40} {time.perf_counter() - started:6.1f} s  {said}  {outcomes[-1].text}", flush=True
            )
            gc.collect()
    failed = sum(found.error is not None for found in outcomes)
    skipped = sum(found.skipped is not None for found in outcomes)
    print(f"{len(names) - failed - skipped} of {len(names)} models are bit-equal, {skipped} skipped")
    return 1 if failed else 0


def names_of(family: str) -> list[str]:
    """Return the names of torchvision's models of a family."""
    module = "torchvision.models" if family == "classification" else f"torchvision.models.{family}"
    names: list[str] = list_models(module=sys.modules[module])
    return names


def _outcome(name: str, directory: Path) -> Outcome:
    try:
        return outcome(name, directory)
    except Exception as error:  # noqa: BLE001 - one model's failure is a line of the report
        traceback.print_exc()
        return Outcome(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
