"""Passes that start at every call of every module: bit-equal to the full pass, or refused.

    python -m tests.sweeps.starts
    python -m tests.sweeps.starts --models resnet18 swin_t

For each model one full pass with random weights, then one pass from the output, and one from the first
input, of every call whose value is one tensor. Some minutes, so not part of the suite, which tries a few
starts of a few models. Prints a line a model, and exits with 1 if any value is wrong, any error is another
than `START_NOT_POSSIBLE`, or anything is left behind.
"""

import argparse
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import structlog
import torch

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server

SIZES = {
    "resnet18": 64,
    "mobilenet_v3_small": 64,
    "shufflenet_v2_x0_5": 64,
    "densenet121": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
    "vit_b_16": 224,
    "convnext_tiny": 64,
    "googlenet": 64,
    "efficientnet_b0": 64,
    "squeezenet1_0": 64,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(SIZES), help="names; all of the list by default")
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    failed = [name for name in parser.parse_args().models if not _check(name)]
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


def _check(name: str) -> bool:
    started, size = time.perf_counter(), SIZES.get(name, 224)
    with (
        running_server(models={name: {"weights": "random:7"}}, device="cpu") as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        image = noise(2, 3, size, size)
        weights, hooks = _digest(server, name), hook_counts(server)
        outcomes, wrong = _starts(client, name, image)
        expected = client.extract(name, image, "/out")
        left = [] if _digest(server, name) == weights else ["weights changed"]
        left += [] if hook_counts(server) == hooks else ["hooks left"]
        left += [] if _equal(client.extract(name, image, "/out"), expected) else ["another output"]
    seconds = time.perf_counter() - started
    print(f"{name:<24} {seconds:7.1f} s  {dict(outcomes)} {' '.join([*wrong[:8], *left])}", flush=True)
    return not wrong and not left


def _starts(client: trocar.Client, name: str, image: Array) -> tuple[Counter[str], list[str]]:
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for port in ("", "/in[0]"):
        full = client.extract(name, image, ["/out", trocar.tap(f"**{port}")])
        for start in full.expansions[f"**{port}"]:
            outcome = _one(client, name, image.shape, start, full)
            outcomes[outcome] += 1
            if outcome not in ("equal", "refused"):
                wrong.append(f"{start}: {outcome};")
    return outcomes, wrong


def _one(
    client: trocar.Client, name: str, shape: tuple[int, ...], start: str, full: trocar.FeatureMaps
) -> str:
    try:
        found = client.extract(name, full[start], "/out", start_at=start, start_shape=shape)
    except trocar.errors.StartNotPossibleError:
        return "refused"
    except trocar.TrocarError as error:
        return f"{type(error).__name__} {error}"[:120]
    return "equal" if _equal(found, full) else "WRONG"


def _equal(found: trocar.FeatureMaps, full: trocar.FeatureMaps) -> bool:
    return all(np.array_equal(found[name], full[name]) for name in found)


def _digest(server: RunningServer, name: str) -> str:
    module: Any = server.engine.deployment(name).hosted.module
    return server.on_owner(
        lambda: str({key: torch.hash_tensor(value).item() for key, value in module.state_dict().items()})
    )


if __name__ == "__main__":
    sys.exit(main())
