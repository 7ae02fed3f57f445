"""The modules of a model: a sequence in execution order that prints as a tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import overload

from trocar._base.names import shortened, unknown_name
from trocar._base.tables import html_facts


@dataclass(frozen=True)
class OutputInfo:
    """One tensor or other leaf of a module's output."""

    pick: str
    """The pick that reaches it, for example `["out"]`; empty for a plain tensor."""
    type: str
    """The Python type: "Tensor", "NoneType", "int", ..."""
    shape: tuple[int, ...] | None
    """Size of each dimension; None for what is no tensor."""
    dtype: str | None
    """For example "float32"; None for what is no tensor."""
    byte_count: int
    """Size of the values in bytes; 0 for what is no tensor."""
    axes: tuple[str, ...] = ()
    """What each dimension means, as in `maps.info[name].axes`; empty where nothing is known of the value."""


@dataclass(frozen=True)
class ModuleInfo:
    """One module of a model."""

    path: str
    """Qualified name as in `torch.nn.Module.named_modules`; empty for the root."""
    type: str
    """The class name, for example "Conv2d"."""
    parameter_count: int
    """Parameter elements of this module and all modules below it."""
    calls: tuple[tuple[OutputInfo, ...], ...]
    """What each call in one pass returned, by call index; empty for a module that is never called."""
    description: str = ""
    """The module's own settings, as `torch.nn.Module.extra_repr` prints them."""

    @property
    def call_count(self) -> int:
        """How often one pass calls the module."""
        return len(self.calls)

    @property
    def outputs(self) -> tuple[OutputInfo, ...]:
        """What the first call returned; empty for a module that is never called."""
        return self.calls[0] if self.calls else ()

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor that the first call returned; None if it did not return one tensor."""
        tensors = [output for output in self.outputs if output.shape is not None]
        return tensors[0].shape if len(tensors) == 1 else None

    @property
    def output_axes(self) -> str:
        """What the dimensions mean of each tensor that the first call returned, for people.

        For example "batch channels height width"; "-" for a dimension of constants, "?" where it is unknown,
        "; " between tensors. Empty where nothing is known.
        """
        known = [output.axes for output in self.outputs if output.shape is not None]
        return (
            "; ".join(" ".join(name or "-" for name in axes) or "?" for axes in known) if any(known) else ""
        )

    @property
    def depth(self) -> int:
        """How deep the module lies in the tree: 0 for the root, 2 for "layer1.0"."""
        return self.path.count(".") + 1 if self.path else 0

    def __repr__(self) -> str:
        return f"<ModuleInfo {self.path or '(root)'}: {', '.join(filter(None, self._facts().values()))}>"

    def _repr_html_(self) -> str:
        """Show the facts in a notebook."""
        return html_facts({"module": self.path or "(root)", **self._facts()})

    def _facts(self) -> dict[str, str]:
        _, kind, parameters, calls, shapes, axes = _cells(self)
        return {
            "type": kind,
            "settings": shortened(self.description),
            "parameters": f"{parameters} parameters" if parameters else "",
            "calls": f"{calls} calls" if self.call_count > 1 else "",
            "output": shapes,
            "dimensions": axes,
        }


class ModuleTree(Sequence[ModuleInfo]):
    """The modules of a model in execution order, the root first; those never called come last.

        tree = client.modules("resnet50")
        print(tree)                          # indented, with parameters, calls and shapes
        tree["layer4"].output_shape          # (1, 2048, 7, 7)
        [module.path for module in tree if module.type == "Conv2d"]

    Attributes:
        is_symbolic: False when the shapes come from a real pass on example data, because the model
            could not be run without data; shapes may then depend on the input's content.
    """

    def __init__(self, modules: Sequence[ModuleInfo], *, is_symbolic: bool = True) -> None:
        self._modules = tuple(modules)
        self._by_path = {module.path: module for module in self._modules}
        self.is_symbolic = is_symbolic

    @overload
    def __getitem__(self, key: int | str) -> ModuleInfo: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[ModuleInfo]: ...
    def __getitem__(self, key: int | str | slice) -> ModuleInfo | Sequence[ModuleInfo]:
        """Return a module by path or by position.

        Raises:
            KeyError: No module has this path; the message has the nearest.
            IndexError: The position is out of range.
        """
        if not isinstance(key, str):
            return self._modules[key]
        if key not in self._by_path:
            raise unknown_name("module", key, self._by_path)
        return self._by_path[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, value: object) -> bool:
        return value in self._by_path if isinstance(value, str) else value in self._modules

    def __repr__(self) -> str:
        root = self._modules[0].type if self._modules else "empty"
        return f"<ModuleTree of {root}: {len(self)} modules>"

    def __str__(self) -> str:
        rows = [_cells(module) for module in self.walk()]
        dimensions = "dimensions" if any(row[5] for row in rows) else ""
        rows.insert(0, ("module", "type", "parameters", "calls", "output", dimensions))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        return "\n".join(_line(row, widths) for row in rows)

    def _repr_html_(self) -> str:
        """Show the tree in a notebook; what lies below the first level is folded."""
        modules = list(self.walk())
        depths = [*(module.depth for module in modules), 0]
        return f"<ul>{''.join(map(_html, modules, depths[1:]))}</ul>"

    def walk(self) -> Iterator[ModuleInfo]:
        """Yield the modules as the tree prints them: each followed by what lies below it.

        A container that is never called itself comes where the first module inside it runs.
        """
        children: dict[str, list[str]] = {}
        placed = {""}
        for path in self._by_path:
            for ancestor in _from_top(path):
                if ancestor not in placed:
                    placed.add(ancestor)
                    children.setdefault(ancestor.rpartition(".")[0], []).append(ancestor)
        pending = [""]
        while pending:
            path = pending.pop()
            yield self._by_path[path]
            pending += children.get(path, [])[::-1]


def _from_top(path: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    names = path.split(".")
    return [".".join(names[: depth + 1]) for depth in range(len(names))] if path else []


def _cells(module: ModuleInfo) -> tuple[str, str, str, str, str, str]:
    name = "  " * module.depth + (module.path.rpartition(".")[2] or "(root)")
    shapes = ", ".join(_output(output) for output in module.outputs) or "never called"
    parameters = f"{module.parameter_count:,}" if module.parameter_count else ""
    return name, module.type, parameters, str(module.call_count or ""), shapes, module.output_axes


def _html(module: ModuleInfo, next_depth: int) -> str:
    """Return a module's entry, open for what lies below it; the last of a level closes that level."""
    _, kind, parameters, _, shapes, axes = _cells(module)
    name = module.path.rpartition(".")[2] or "(root)"
    counted = f"{parameters} parameters" if parameters else ""
    facts = escape(", ".join(filter(None, (kind, counted, shapes, axes))))
    line = f'<b title="{escape(module.path)}">{escape(name)}</b> {facts}'
    if next_depth > module.depth:
        state = " open" if not module.depth else ""
        return f"<li><details{state}><summary>{line}</summary><ul>"
    return f"<li>{line}</li>" + "</ul></details></li>" * (module.depth - next_depth)


def _output(output: OutputInfo) -> str:
    value = output.type if output.shape is None else str(tuple(output.shape))
    return f"{output.pick} {value}".lstrip()


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    name, kind, parameters, calls, shapes, axes = row
    return (
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {parameters:>{widths[2]}}  {calls:>{widths[3]}}  "
        f"{shapes:<{widths[4]}}  {axes}"
    ).rstrip()
