"""`trocar modules`: the module tree of a model."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.text import Text

from trocar import Client, ModuleInfo, ModuleTree
from trocar._cli.console import Rows, shape_text, show, show_json, table
from trocar._cli.options.arguments import AsJson, ModelId, parse_shape


def modules(
    client: Client,
    model_id: ModelId,
    input_shape: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="SHAPE", help="Assumed input shape, including the batch: 1,3,224,224."
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=0, help="Show modules up to this depth; 0 is the root."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the modules of a model as a tree.

    In execution order, with type, parameters, calls in one pass and the shape of the output. Nothing is
    computed.
    """
    tree = client.modules(model_id, parse_shape(input_shape))
    kept = [module for module in tree.walk() if depth is None or module.depth <= depth]
    if as_json:
        show_json({"model_id": model_id, "is_symbolic": tree.is_symbolic, "modules": kept})
        return
    show(tree_table(kept))
    _show_remarks(tree, len(tree) - len(kept))


def tree_table(result: Sequence[ModuleInfo]) -> Rows:
    """Draw modules, in the order of `ModuleTree.walk`, as a tree with columns."""
    rows = table(
        *("module", "type", "parameters", "calls", "output", "dimensions"),
        right=("parameters", "calls"),
        whole=("module",),
    )
    for guide, module in zip(_guides(result), result, strict=True):
        name = module.path.rpartition(".")[2] or "(root)"
        rows.add_row(
            Text.assemble((guide, "dim"), name),
            Text(module.type, style="cyan"),
            f"{module.parameter_count:,}" if module.parameter_count else "",
            str(module.call_count or ""),
            _output(module),
            module.output_axes,
        )
    return rows


def _guides(modules: Sequence[ModuleInfo]) -> Iterator[str]:
    """Yield the lines that lead to each module of a tree in its printed order."""
    last_child = {module.path.rpartition(".")[0]: module.path for module in modules if module.path}
    for module in modules:
        names = module.path.split(".") if module.path else []
        line = [".".join(names[: depth + 1]) for depth in range(len(names))]
        is_last = [last_child[path.rpartition(".")[0]] == path for path in line]
        above = "".join("   " if last else "│  " for last in is_last[:-1])
        yield above + ("└─ " if is_last[-1] else "├─ ") if is_last else ""


def _output(module: ModuleInfo) -> Text:
    if not module.calls:
        return Text("never called", style="dim")
    leaves = [f"{leaf.pick} {shape_text(leaf.shape) or leaf.type}".lstrip() for leaf in module.outputs]
    return Text(", ".join(leaves))


def _show_remarks(tree: ModuleTree, hidden_count: int) -> None:
    if hidden_count:
        typer.echo(f"{hidden_count} deeper modules are not shown")
    if not tree.is_symbolic:
        typer.echo("shapes are those of a pass on example data; other data may give other shapes")
