"""Conversion of a traced graph to OpenVINO's files. Takes seconds and calls torch: in a separate process."""

import warnings
from pathlib import Path

from torch import nn

from trocar_server.engine.compiled.backends.graph_tracing import trace
from trocar_server.engine.compiled.backends.recipe import Recipe

GRAPH_FILE = "graph.xml"


def convert(model: nn.Module, recipe: Recipe, folder: Path) -> None:
    """Write `graph.xml` and `graph.bin`: float32 weights, outputs in the order of the recipe.

    The last output may be that of Note: [Indices outside of a table].

    Raises:
        Exception: Any error of torch.export or OpenVINO on a model that they do not support.
    """
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = trace(model, recipe)
        graph = openvino.convert_model(program)
    if len(graph.outputs) != len(program.graph_signature.user_outputs):
        raise ValueError(f"{len(recipe.names)} values are requested, but the graph has {len(graph.outputs)}")
    if len(graph.inputs) != len(recipe.arguments):
        raise ValueError("the values do not depend on every input")
    for spec, argument in zip(recipe.arguments, graph.inputs, strict=True):
        argument.get_node().set_partial_shape(openvino.PartialShape([-1, *spec.row_shape]))
    graph.validate_nodes_and_infer_types()
    openvino.save_model(graph, folder / GRAPH_FILE, compress_to_fp16=False)
