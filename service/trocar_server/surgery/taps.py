"""Collecting values from a pass with forward hooks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from trocar_server.surgery.structure import Picks, pick


@dataclass(frozen=True)
class Target:
    """One value to collect: exactly one tensor of one call of one module.

    Attributes:
        name: The selector that stands for it alone.
        path: Module path; empty for the model itself.
        call: Call index, from 0.
        port: `out`, `in` or `in(name)`.
        picks: The way into the port's value. The value of `in` is the tuple of positional inputs.
        clone: Whether to copy the value when it is collected. See Note: [Clone before in-place].
    """

    name: str
    path: str
    call: int
    port: str = "out"
    picks: Picks = ()
    clone: bool = True


class StopForward(BaseException):
    """Everything wanted has been collected. Not an `Exception`: a model's own `except` must not eat it."""


class TapSession:
    """Collects values from a model for as long as the context is open.

        with TapSession(model, targets) as session:
            model(batch)
        session.values[target.name]

    Either every tap is registered or none is: a bad path leaves the model as it was. The pass ends,
    without an error, after the last executed call that is needed; `stopped_at` then names it.
    A value that the model later overwrites is cloned in the hook when its target says so.

    Not thread-safe: hooks are state of the module, so the caller holds the replica's lease for as
    long as the session is open.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.stopped_at: str | None = None
        self._wanted = _by_hook(targets)
        self._modules = {path: model.get_submodule(path) for path, _ in self._wanted}
        self._pending = sum(len(calls) for calls in self._wanted.values())
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        try:
            for (path, is_input), calls in self._wanted.items():
                self._hooks.callback(self._register(path, is_input, calls).remove)
        except BaseException:
            self._hooks.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._hooks.close()
        return isinstance(error, StopForward)

    def _register(self, path: str, is_input: bool, calls: dict[int, list[Target]]) -> Any:
        module = self._modules[path]
        collect = self._collector(path, calls)
        if is_input:
            return module.register_forward_pre_hook(
                lambda _, args, kwargs: collect(
                    {"in": args, **{f"in({key})": kwargs[key] for key in kwargs}}
                ),
                with_kwargs=True,
            )
        return module.register_forward_hook(lambda _, args, output: collect({"out": output}))

    def _collector(self, path: str, calls: dict[int, list[Target]]) -> Callable[[dict[str, Any]], None]:
        count = 0

        def collect(ports: dict[str, Any]) -> None:
            nonlocal count
            index, count = count, count + 1
            if index not in calls:
                return
            for target in calls[index]:
                self._keep(target, pick(ports[target.port], target.picks))
            self._pending -= 1
            if not self._pending:
                self.stopped_at = path
                raise StopForward

        return collect

    def _keep(self, target: Target, value: Any) -> None:
        self.values[target.name] = value.clone() if target.clone else value


def _by_hook(targets: Sequence[Target]) -> dict[tuple[str, bool], dict[int, list[Target]]]:
    """Group targets by the hook that collects them, (path, whether it is a pre-hook), then by call."""
    wanted: dict[tuple[str, bool], dict[int, list[Target]]] = {}
    for target in targets:
        hook = wanted.setdefault((target.path, target.port != "out"), {})
        hook.setdefault(target.call, []).append(target)
    return wanted
