"""Context managers on a module tree: taps, edits, gradients.

Usable alone on any `nn.Module`, with no server:

    recording = record_calls(model, (batch,))
    targets = resolve([parse_selector("layer4"), parse_selector("fc/in")], recording)
    with TapSession(model, [target for expansion in targets for target in expansion]) as session:
        model(batch)
    session.values
"""

from trocar_server.surgery.editing import CallInput, EditSession, EditTarget
from trocar_server.surgery.functions import FunctionSession, record_functions
from trocar_server.surgery.gradient_errors import differentiable, independent, no_gradient_of
from trocar_server.surgery.gradient_sites import GradientPoint
from trocar_server.surgery.gradients import GradientSession
from trocar_server.surgery.graph import TracedGraph, trace_graph
from trocar_server.surgery.guard import PassAborted, PassGuard
from trocar_server.surgery.kept_tensors import graphs_end_here
from trocar_server.surgery.moments import Skips, moment
from trocar_server.surgery.nodes import NodeSession, record_nodes
from trocar_server.surgery.operating import Surgery, operate
from trocar_server.surgery.parsing import parse_selector
from trocar_server.surgery.recording import Call, Leaf, ModuleRecord, Recording, record_calls
from trocar_server.surgery.resolve import resolve
from trocar_server.surgery.selectors import Selector
from trocar_server.surgery.starting import StartMixedError, StartSession, laid_out
from trocar_server.surgery.taps import Collector, TapSession, Target, ValueMissingError

__all__ = [
    "Call",
    "CallInput",
    "Collector",
    "EditSession",
    "EditTarget",
    "FunctionSession",
    "GradientPoint",
    "GradientSession",
    "Leaf",
    "ModuleRecord",
    "NodeSession",
    "PassAborted",
    "PassGuard",
    "Recording",
    "Selector",
    "Skips",
    "StartMixedError",
    "StartSession",
    "Surgery",
    "TapSession",
    "Target",
    "TracedGraph",
    "ValueMissingError",
    "differentiable",
    "graphs_end_here",
    "independent",
    "laid_out",
    "moment",
    "no_gradient_of",
    "operate",
    "parse_selector",
    "record_calls",
    "record_functions",
    "record_nodes",
    "resolve",
    "trace_graph",
]
