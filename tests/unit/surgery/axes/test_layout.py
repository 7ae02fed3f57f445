"""Layouts: which positions of a dimension are a sample's own, against passes of each sample alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trocar_server.surgery.axes.axis import Axis, Kind, whole
from trocar_server.surgery.axes.layout import Layout
from trocar_server.surgery.recording.layout_walk import walk

LENGTHS = (9, 17, 23)
WIDTH = 4


class Net(nn.Module):
    """A function of (batch, tokens, width) and a mask that it ignores."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv1d(WIDTH, 6, 5, stride=2, padding=1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def with_class_token(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net.class_token.expand(len(x), -1, -1), x], 1)


def frames(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(net.conv(x.mT), 3).mT


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "as they are": lambda _, x: x * 2,
    "a class token before them": with_class_token,
    "frames of a convolution and a pool": frames,
    "without the first": lambda _, x: x[:, 1:],
    "without the last": lambda _, x: x[:, :-1],
    "a causal convolution": lambda _, x: F.conv1d(x.mT, torch.ones(6, WIDTH, 4), padding=3)[..., :-3].mT,
    "heads and back": lambda _, x: x.unflatten(2, (2, 2)).transpose(1, 2).transpose(1, 2).flatten(2),
}


def layout_of(net: Net) -> Layout:
    """Return the layout of the output."""
    batch, tokens = Axis(Kind.BATCH, 3), Axis(Kind.NAMED, 24, "tokens")
    x, mask = torch.zeros(3, 24, WIDTH), torch.ones(3, 24, dtype=torch.int64)
    dims = [
        (x, (whole(batch), whole(tokens), whole(Axis(Kind.CHANNELS, WIDTH)))),
        (mask, (whole(batch), whole(tokens))),
    ]
    found = walk(net, ((x, mask), {}), {"attention_mask": mask}, dims, {}).layouts.find("", 0, "out", ())
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_sample_has_as_many_positions_as_alone(case: str) -> None:
    net = Net(CASES[case]).eval()
    layout = layout_of(net)
    assert layout.axes[::2] == ("batch", "channels")
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    given = {"attention_mask": mask}
    assert layout.masked_dims(given) == [1]
    with torch.no_grad():
        together = net(torch.zeros(3, max(LENGTHS), WIDTH), mask)
        alone = [net(torch.zeros(1, length, WIDTH), mask).shape[1] for length in LENGTHS]
    own = layout.mask_of(1, given, together.shape[1])
    assert own is not None
    assert own.shape == together.shape[:2]
    assert own.sum(1).tolist() == alone


def test_windows_of_padding_on_the_left_are_not_known() -> None:
    layout = layout_of(Net(frames).eval())
    mask = torch.arange(23, 0, -1) <= torch.tensor(LENGTHS)[:, None]
    assert layout.mask_of(1, {"attention_mask": mask}, 3) is None


def test_time_that_comes_first_is_no_batch() -> None:
    net = nn.LSTM(WIDTH, 5)
    batch, time = Axis(Kind.BATCH, 3), Axis(Kind.NAMED, 7, "tokens")
    x = torch.zeros(7, 3, WIDTH)
    dims = [(x, (whole(time), whole(batch), whole(Axis(Kind.CHANNELS, WIDTH))))]
    layouts = walk(net, ((x,), {}), {}, dims, {}).layouts
    output, state = (layouts.find("", 0, "out", picks) for picks in ((0,), (1, 0)))
    assert output is not None
    assert state is not None
    assert output.axes == ("tokens", "batch", "channels")
    assert (state.batch, state.channels) == (1, 2)


def test_what_no_rule_knows_is_unknown() -> None:
    net = Net(lambda _, x: torch.linalg.svd(x)[0]).eval()
    assert set(layout_of(net).axes) == {"?"}
