"""Context managers on a module tree: taps, edits, gradients.

Usable alone on any `nn.Module`, with no server:

    recording = record_calls(model, (batch,))
    targets = resolve([parse_selector("layer4"), parse_selector("fc/in")], recording)
    with TapSession(model, [target for expansion in targets for target in expansion]) as session:
        model(batch)
    session.values
"""

from trocar_server.surgery.guard import PassAborted, PassGuard
from trocar_server.surgery.kept_tensors import (
    clear_caches,
    graphs_end_here,
    is_of_inference_mode,
    needs_autograd,
)
from trocar_server.surgery.ports import named_arguments
from trocar_server.surgery.recording.graph import TracedGraph, trace_graph
from trocar_server.surgery.recording.recording import Leaf, ModuleCall, ModuleRecord, Recording, record_calls
from trocar_server.surgery.resolution.resolve import resolve
from trocar_server.surgery.selectors.parsing import parse_selector
from trocar_server.surgery.selectors.selectors import Selector
from trocar_server.surgery.sessions.call_order import Skips, call_order, place
from trocar_server.surgery.sessions.editing import CallInput, EditSession, EditTarget
from trocar_server.surgery.sessions.functions import (
    FunctionSession,
    attention_in,
    attention_names,
    record_functions,
)
from trocar_server.surgery.sessions.gradient_errors import differentiable, independent, no_gradient_of
from trocar_server.surgery.sessions.gradient_sites import GradientPoint
from trocar_server.surgery.sessions.gradients import GradientSession
from trocar_server.surgery.sessions.nodes import NodeSession, record_nodes
from trocar_server.surgery.sessions.operating import Surgery, operate
from trocar_server.surgery.sessions.recomputation import RecomputationInGraph, without_recomputation
from trocar_server.surgery.sessions.recurrent_layers import differentiable_recurrence, recurrent_layers
from trocar_server.surgery.sessions.reruns import NoReruns
from trocar_server.surgery.sessions.starting import StartMixedError, StartSession, laid_out
from trocar_server.surgery.sessions.taps import (
    CallsDifferError,
    Collector,
    TapGroups,
    TapSession,
    Target,
    ValueMissingError,
)

__all__ = [
    "CallInput",
    "CallsDifferError",
    "Collector",
    "EditSession",
    "EditTarget",
    "FunctionSession",
    "GradientPoint",
    "GradientSession",
    "Leaf",
    "ModuleCall",
    "ModuleRecord",
    "NoReruns",
    "NodeSession",
    "PassAborted",
    "PassGuard",
    "RecomputationInGraph",
    "Recording",
    "Selector",
    "Skips",
    "StartMixedError",
    "StartSession",
    "Surgery",
    "TapGroups",
    "TapSession",
    "Target",
    "TracedGraph",
    "ValueMissingError",
    "attention_in",
    "attention_names",
    "call_order",
    "clear_caches",
    "differentiable",
    "differentiable_recurrence",
    "graphs_end_here",
    "independent",
    "is_of_inference_mode",
    "laid_out",
    "named_arguments",
    "needs_autograd",
    "no_gradient_of",
    "operate",
    "parse_selector",
    "place",
    "record_calls",
    "record_functions",
    "record_nodes",
    "recurrent_layers",
    "resolve",
    "trace_graph",
    "without_recomputation",
]
