"""Inputs in selectors: `/in`, `/in[k]` and `/in(name)`, to recorded inputs and back.

See Note: [Names of inputs].
"""

from trocar_server.surgery.ports import Parameters, Place
from trocar_server.surgery.recording.recording import Leaf, ModuleCall
from trocar_server.surgery.selectors.naming import split_port
from trocar_server.surgery.selectors.selectors import Selector
from trocar_server.surgery.structure import Picks


def input_place(selector: Selector, parameters: Parameters, call: ModuleCall) -> Place:
    """Return the port of the input that a selector names, and the path to the selected part of it.

    A number directly behind `/in` counts parameters, from the end those that the call received; any other
    pick leads into the value of the first parameter.
    """
    _, name = split_port(selector.port)
    if name is not None:
        port, before = parameters.place_of(name)
        return port, (*before, *selector.picks)
    if selector.picks and isinstance(selector.picks[0], int):
        port, before = _counted(selector.picks[0], parameters, call)
        return port, (*before, *selector.picks[1:])
    port, before = _first(parameters, call)
    return port, (*before, *selector.picks)


def shown_place(leaf: Leaf, parameters: Parameters) -> Place:
    """Return port and picks of a recorded value as shown in its name: without the first input's position."""
    if leaf.port != "in" or leaf.picks[:1] != (0,):
        return leaf.port, leaf.picks
    rest = leaf.picks[1:]
    return "in", leaf.picks if rest and isinstance(rest[0], int) else rest


def _first(parameters: Parameters, call: ModuleCall) -> Place:
    received = _received(call)
    if not parameters.names and len(received) == 1:  # a single keyword of a forward that takes any
        return received[0]
    return "in", (0,)


def _counted(position: int, parameters: Parameters, call: ModuleCall) -> Place:
    if position >= 0:
        return parameters.place_at(position)
    received = _received(call)
    return received[position] if -position <= len(received) else ("in", (position,))


def _received(call: ModuleCall) -> list[Place]:
    """Return the inputs of a call, each once, in the order of the parameters."""
    places: dict[tuple[str, Picks], None] = {}
    for leaf in call.inputs:
        places[leaf.port, leaf.picks[:1] if leaf.port == "in" else ()] = None
    return list(places)
