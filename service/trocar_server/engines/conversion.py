"""From a traced graph to OpenVINO's files. Takes seconds and calls torch: in a process of its own."""

import warnings
from pathlib import Path

from torch import nn

from trocar_server.engines.recipe import Recipe
from trocar_server.engines.tracing import trace

GRAPH_FILE = "graph.xml"


def convert(model: nn.Module, recipe: Recipe, folder: Path) -> None:
    """Write `graph.xml` and `graph.bin`: float32 weights, outputs in the order of the recipe.

    Raises:
        Exception: Whatever torch.export or OpenVINO says of a model that they cannot follow.
    """
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(trace(model, recipe))
    if len(graph.outputs) != len(recipe.names):
        raise ValueError(f"{len(recipe.names)} values are wanted, the graph has {len(graph.outputs)}")
    if len(graph.inputs) != len(recipe.arguments):
        raise ValueError("the values do not depend on every input")
    for form, argument in zip(recipe.arguments, graph.inputs, strict=True):
        argument.get_node().set_partial_shape(openvino.PartialShape([-1, *form.row_shape]))
    graph.validate_nodes_and_infer_types()
    openvino.save_model(graph, folder / GRAPH_FILE, compress_to_fp16=False)
