"""Patch grid: which tokens of a value are the patches of a picture, in the recorded pass of a request.

Rows and columns follow from the value's layout and the sizes of the request's own inputs. Tokens before and
behind them, such as class and register tokens, are other parts of the same dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import TapRequest
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target
from trocar_server.surgery.axes.token_grid import TokenGrid
from trocar_server.tensors.reductions import Grid


def input_sizes(recording: Recording) -> Mapping[str, int]:
    """Return the length of each axis of a pass's inputs, by name; none of axes of several lengths."""
    layouts = recording.layouts
    lengths: dict[str, set[int]] = {}
    for leaf in recording.modules[""].calls[0].inputs if layouts is not None else ():
        layout = None if layouts is None else layouts.find("", 0, leaf.port, leaf.picks)
        if layout is not None and leaf.shape is not None:
            for name, size in zip(layout.axes, leaf.shape, strict=True):
                lengths.setdefault(name, set()).add(size)
    return {name: next(iter(sizes)) for name, sizes in lengths.items() if len(sizes) == 1}


def with_grid(tap: TapRequest, target: Target, grids: Sequence[TokenGrid]) -> TapRequest:
    """Return a tap whose `Grid` without numbers has the value's, where they are known.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, its patches are of a video, or other tokens come behind them.
    """
    if Grid() not in tap.reductions or len(grids) != 1:
        return tap
    (grid,) = grids
    rest = _problem(grid)
    if rest:
        raise ServiceError(ErrorReason.REDUCTION_REJECTED, f"'{target.name}': {rest}", name=target.name)
    rows, columns = grid.sizes
    own = Grid(rows, columns, grid.first)
    return replace(tap, reductions=tuple(own if entry == Grid() else entry for entry in tap.reductions))


def _problem(grid: TokenGrid) -> str:
    """Return why patches cannot be one picture, with the reductions that make them one; empty if they can."""
    *frames, rows, columns = grid.sizes
    place = ":, " * grid.dim
    if frames:
        stop = grid.first + rows * columns
        shown = " x ".join(map(str, grid.sizes))
        return (
            f"its tokens are patches of {shown} (frames x rows x columns); choose one frame, for example "
            f"reduce=[trocar.index(np.s_[{place}{grid.first}:{stop}]), trocar.grid({rows}, {columns})]"
        )
    if grid.last:
        numbers = f"{rows}, {columns}" + (f", prefix={grid.first}" if grid.first else "")
        return (
            f"{grid.last} tokens that are no patches come behind the {rows} x {columns} patches; leave them "
            f"out, as reduce=[trocar.index(np.s_[{place}:-{grid.last}]), trocar.grid({numbers})]"
        )
    return ""
