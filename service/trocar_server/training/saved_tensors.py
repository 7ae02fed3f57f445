"""Where tensors lie that autograd saves for the backward pass: as usual, in host memory, or in a spool."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn
from torch.autograd.graph import save_on_cpu

from trocar_server.spool import Spool
from trocar_server.spool.wrapping import Wrapped
from trocar_server.training.allocator import SPOOLING
from trocar_server.training.parameters import select_modules
from trocar_server.training.spec import SavedTensorsSpec
from trocar_server.training.totals import TOTALS


class SavedTensors:
    """Keeps saved tensors as a spec says, for every forward pass that runs in its context.

        saved = SavedTensors(model, spec.saved_tensors, scratch, stages={})
        with saved.forward():
            loss = criterion(model(x), y)
        loss.backward()

    Gradients are bit-equal to those without it, unless the spec asks for less precision on disk.

    Args:
        module: The trainer's tree.
        spec: What is wanted.
        scratch_dir: Where the spool may make its folder.
        stages: Selectors by stage name.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, a selector matches nothing.
    """

    def __init__(
        self, module: nn.Module, spec: SavedTensorsSpec, scratch_dir: Path, stages: Mapping[str, str]
    ) -> None:
        paths = select_modules(module, spec.modules, "saved_tensors.modules", stages)
        self._modules = [module.get_submodule(path) for path in paths]
        is_on_device = any(parameter.device.type != "cpu" for parameter in module.parameters())
        self._is_host = spec.store == "host" and is_on_device  # on the CPU they are in its memory already
        self._spool: Spool | None = None
        if spec.store == "spool":
            self._spool = Spool(
                scratch_dir,
                spec.budget_bytes,
                min_bytes=spec.min_bytes,
                modules=self._modules or None,
                keep=[module],
                store_dtype=spec.store_dtype or None,
            )
            SPOOLING.begin()
            TOTALS.begin_spool(self._spool.counters)

    def forward(self) -> AbstractContextManager[object]:
        """Return the context of one forward pass."""
        if self._spool is not None:
            return self._spool
        if self._is_host:
            return _on_host(self._modules)
        return nullcontext()

    def counts(self) -> tuple[int, int]:
        """Return the bytes that the spool has taken over and written so far, in all passes."""
        if self._spool is None:
            return 0, 0
        report = self._spool.report()
        return report.saved_bytes, report.written_bytes

    def close(self) -> None:
        """Stop the spool and remove its files."""
        if self._spool is not None:
            self._spool.close()
            TOTALS.end_spool(self._spool.counters)
            self._spool = None
            SPOOLING.end()


def _on_host(modules: Sequence[nn.Module]) -> AbstractContextManager[object]:
    whole = save_on_cpu()
    if not modules:
        return whole
    return Wrapped(modules, whole.pack_hook, whole.unpack_hook)
