"""Multiply-adds of recorded passes equal those of torch's own counter, also of predicted passes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from trocar_server.models import make_meta_replica
from trocar_server.surgery import record_calls
from trocar_server.surgery.recording.symbolic import is_tried, record_symbolic


class Products(nn.Module):
    """Products and attention by every operator that is counted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.baddbmm(x @ x.transpose(1, 2), x, x.transpose(1, 2))
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0] + (
            torch.bmm(scores, x) @ torch.ones(x.shape[2], x.shape[2], device=x.device)
        )


CASES: list[tuple[Callable[[], nn.Module], Sequence[int]]] = [
    (resnet18, (2, 3, 64, 64)),
    (lambda: nn.Conv1d(8, 12, 5, stride=2, groups=4), (2, 8, 33)),
    (lambda: nn.ConvTranspose2d(8, 12, 3, stride=2, groups=2), (2, 8, 9, 7)),
    (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)), (3, 8)),
    (Products, (2, 7, 16)),
]


def counted(model: nn.Module, shape: Sequence[int]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.to("meta")(torch.zeros(*shape, device="meta"))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_work_is_that_of_torchs_counter(make: Callable[[], Any], shape: Sequence[int]) -> None:
    model = make().eval()
    recording = record_calls(make_meta_replica(model), (torch.zeros(*shape, device="meta"),))
    assert recording.work == recording.modules[""].calls[0].work == counted(model, shape) > 0


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_work_of_a_pass_on_data_is_no_more(make: Callable[[], Any], shape: Sequence[int]) -> None:
    from trocar_server.surgery.recording.liveness import LiveBytes

    model = make().eval()
    recording = record_calls(model, (torch.zeros(*shape),), is_symbolic=False, live=LiveBytes())
    assert 0 < recording.work <= counted(model, shape)


@pytest.mark.skipif(not is_tried(torch.__version__), reason="symbolic recordings need another torch")
@pytest.mark.parametrize(("make", "shape"), CASES)
def test_work_of_other_sizes_is_predicted(make: Callable[[], Any], shape: Sequence[int]) -> None:
    model = make().eval()
    symbolic = record_symbolic(make_meta_replica(model), (torch.zeros(*shape, device="meta"),))
    larger = (shape[0] + 3, *shape[1:])
    predicted = symbolic.recording([larger])
    assert predicted is not None
    recorded = record_calls(make_meta_replica(model), (torch.zeros(*larger, device="meta"),))
    assert predicted.work == recorded.work
    assert dict(predicted.modules) == dict(recorded.modules)


def test_work_until_a_call_is_known() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).eval()
    recording = record_calls(make_meta_replica(model), (torch.zeros(3, 8, device="meta"),))
    calls = {path: record.calls[0] for path, record in recording.modules.items()}
    assert (calls["0"].work_before, calls["0"].work) == (0, 3 * 8 * 16)
    assert (calls["1"].work_before, calls["1"].work) == (3 * 8 * 16, 3 * 8 * 16 + 3 * 16 * 4)
