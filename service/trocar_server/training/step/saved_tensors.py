"""Saved tensors of autograd: storage on the device, in host memory, or in a spool.

# Note: [Freed memory]
Passes without gradients are faster if the C allocator keeps freed memory; a spool saves memory only if it is
returned to the system. So it is returned while any trainer has a spool; then the former setting is restored.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from trocar_server.engine.schedule.allocator import is_kept, keep_freed_memory
from trocar_server.spool import Spool
from trocar_server.spool.allocator_settings import return_freed_memory
from trocar_server.spool.report import Report
from trocar_server.spool.saved.wrapping import Wrapped
from trocar_server.training.model.trained_parameters import select_modules
from trocar_server.training.spec.trainer_spec import SavedTensorsSpec


class AllocatorMode:
    """Allocator setting of the process: counts the trainers with a spool. See Note: [Freed memory]."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._was_kept = False

    def begin(self) -> None:
        """Count one more trainer with a spool."""
        with self._lock:
            if not self._count:
                self._was_kept = is_kept()
                return_freed_memory()
            self._count += 1

    def end(self) -> None:
        """Count one trainer less."""
        with self._lock:
            self._count -= 1
            if not self._count and self._was_kept:
                keep_freed_memory()


SPOOLING = AllocatorMode()


@dataclass
class SpoolTotals:
    """Monotonic counters of a process for monitoring: what all spools have written, read and waited for."""

    _reports: list[Report] = field(default_factory=list)
    _gone: Report = field(default_factory=Report)
    _lock: Lock = field(default_factory=Lock)  # a scrape must count each spool exactly once

    def begin(self, report: Report) -> None:
        """Include the running report of a spool."""
        with self._lock:
            self._reports.append(report)

    def end(self, report: Report) -> None:
        """Keep the sums of a closed spool; has no effect for an unknown one."""
        with self._lock:
            if not any(known is report for known in self._reports):
                return
            self._gone.written_bytes += report.written_bytes
            self._gone.read_bytes += report.read_bytes
            self._gone.stall_s += report.stall_s
            self._reports = [known for known in self._reports if known is not report]

    def sums(self) -> tuple[int, int, float]:
        """Return the bytes that all spools have written and read, and the seconds that steps waited."""
        with self._lock:
            reports = [self._gone, *self._reports]
            return (
                sum(report.written_bytes for report in reports),
                sum(report.read_bytes for report in reports),
                sum(report.stall_s for report in reports),
            )


SPOOLED = SpoolTotals()
"""Of this process, closed trainers included."""


class SavedTensors:
    """Stores saved tensors according to a spec, for every forward pass that runs in its context.

        saved = SavedTensors(model, spec.saved_tensors, scratch, stages={})
        with saved.forward():
            loss = criterion(model(x), y)
        loss.backward()

    Gradients are bit-equal to those without it, unless the spec asks for less precision on disk.

    Args:
        module: The trainer's module tree.
        spec: The storage spec.
        scratch_dir: Parent of the spool's folder.
        stages: Selectors by stage name.

    Attributes:
        is_used: Whether any tensor is stored elsewhere than on the device; other passes need no context.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, a selector matches nothing.
    """

    def __init__(
        self, module: nn.Module, spec: SavedTensorsSpec, scratch_dir: Path, stages: Mapping[str, str]
    ) -> None:
        paths = select_modules(module, spec.modules, "saved_tensors.modules", stages)
        self._modules = [module.get_submodule(path) for path in paths]
        is_on_device = any(parameter.device.type != "cpu" for parameter in module.parameters())
        self._is_host = spec.store == "host" and is_on_device  # on the CPU they are in host memory already
        self._spool: Spool | None = None
        self.is_used = spec.store == "spool" or self._is_host
        if spec.store == "spool":
            self._spool = Spool(
                scratch_dir,
                spec.budget_bytes,
                min_bytes=spec.min_bytes,
                modules=self._modules or None,
                keep=[module],
                store_dtype=spec.store_dtype or None,
                device_bytes=spec.device_bytes,
            )
            SPOOLING.begin()
            SPOOLED.begin(self._spool.counters)

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of one forward pass."""
        if self._spool is not None:
            return self._spool
        if self._is_host:
            return _on_host(self._modules)
        return nullcontext()

    def counts(self) -> tuple[int, int]:
        """Return the bytes that the spool has received and written so far, over all passes."""
        if self._spool is None:
            return 0, 0
        report = self._spool.report()
        return report.saved_bytes, report.written_bytes

    def close(self) -> None:
        """Stop the spool and remove its files."""
        if self._spool is not None:
            self._spool.close()
            SPOOLED.end(self._spool.counters)
            self._spool = None
            SPOOLING.end()


def _on_host(modules: Sequence[nn.Module]) -> AbstractContextManager[object]:
    whole = save_on_cpu()
    if not modules:
        return whole
    return Wrapped(modules, lambda: saved_tensors_hooks(whole.pack_hook, whole.unpack_hook))
