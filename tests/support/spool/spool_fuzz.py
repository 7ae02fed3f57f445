"""One random program, or several at once, plainly and with spools of random budgets; see `spool_programs`."""

import gc
import random
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.support.spool.spool_audit import AuditedLedger
from tests.support.spool.spool_programs import PLAIN, Contexts, Events, Program, difference
from trocar_server.spool import Spool
from trocar_server.spool.blocks import block_store

_BUDGETS = (0, 0, 300, 300, 1_000, 4_000, 10_000_000)
_LEAST = (0, 0, 1, 64)
_WINDOWS = (0, 300, 2_000, 1_000_000)
_PAUSES_S = (0, 0, 0, 0.02, 0.05, 0.1, 0.2)


def failure(seed: int, directory: Path, thread_count: int = 1) -> str | None:
    """Say what is wrong with the programs of a seed, each in a thread of its own; None where all is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what programs do
        return _failure(seed, directory, thread_count)


def _failure(seed: int, directory: Path, thread_count: int) -> str | None:
    seeds = range(seed * thread_count, (seed + 1) * thread_count)
    plain = [events for each in seeds for events in _run_at_once([Program(each, PLAIN)])]
    with _spools(seed, directory) as spools:
        contexts: Contexts = [_entering(spools[0]), _entering(spools[1]), _checked]
        spooled = _run_at_once([Program(each, contexts) for each in seeds])
        for one, other in zip(plain, spooled, strict=True):
            found = difference(one, other)
            if found is not None:
                return found
        for spool in spools:
            found = _left(spool)
            if found is not None and not _torch_leaks(seeds):
                return found
    return None


class _Held:
    """What plain hooks hold; what is still there at the end of a program is a leak of torch's own."""

    count = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        _Held.count += 1

    def __del__(self) -> None:
        _Held.count -= 1


def _checked() -> saved_tensors_hooks:
    """Hooks that keep tensors in memory, and look at their versions as torch does without hooks."""

    def unpack(held: Any) -> torch.Tensor:
        if held.tensor._version != held.version:
            raise RuntimeError("modified by an inplace operation")
        tensor: torch.Tensor = held.tensor
        return tensor

    return saved_tensors_hooks(_Held, unpack)


def _entering(spool: Spool) -> Any:
    return lambda: spool


@contextmanager
def _spools(seed: int, directory: Path) -> Iterator[list[Spool]]:
    choice = random.Random(seed)
    with patch.object(block_store, "Ledger", AuditedLedger):
        spools = [
            Spool(
                directory,
                choice.choice(_BUDGETS),
                min_bytes=choice.choice(_LEAST),
                ahead_bytes=choice.choice(_WINDOWS),
                checksum=choice.random() < 0.3,
            )
            for _ in range(2)
        ]
        try:
            yield spools
        finally:
            for spool in spools:
                spool.close()


def _run_at_once(programs: list[Program]) -> list[Events]:
    # Each in a new thread, also where it is alone: nodes are numbered by thread, and numbers say in which
    # order backward adds up gradients.
    threads = [threading.Thread(target=program.run) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [program.events for program in programs]


def _left(spool: Spool) -> str | None:
    ledger = spool.store.ledger
    assert isinstance(ledger, AuditedLedger)
    if ledger.failures:
        return f"the ledger: {ledger.failures[0]}"
    # Tensors and nodes of torch that hold one another take more than one pass, and the threads on which torch
    # runs reentrant backward passes let go of a graph a moment after the pass.
    for pause_s in _PAUSES_S:
        if not ledger.is_empty:
            gc.collect()
            time.sleep(pause_s)
    if not ledger.is_empty or spool.store.blocks.by_key or ledger.staying or ledger.stored:
        return f"{ledger.live_bytes} bytes are left when all graphs are gone"
    return None


def _torch_leaks(seeds: range) -> bool:
    """Whether graphs of these programs stay for ever without a spool, too (cycles of changes in place)."""
    gc.collect()
    before = _Held.count
    for seed in seeds:
        _run_at_once([Program(seed, [_checked] * 3)])
    gc.collect()
    return _Held.count > before
