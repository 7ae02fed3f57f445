"""Where tensors lie that autograd saves."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.support.spool.spool_devices import all_tensors_on_a_device
from tests.unit.training.trainers import core_of, tiny
from trocar_server.errors import ServiceError
from trocar_server.spool.report import Report
from trocar_server.training.spec.trainer_spec import SavedTensorsSpec
from trocar_server.training.step import saved_tensors
from trocar_server.training.step.saved_tensors import SavedTensors, SpoolTotals


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("of", [[], [0, 2]])
def test_gradients_from_host_memory_are_the_same(of: list[int]) -> None:
    net, other, x = model(), model(), torch.randn(3, 4)
    with saved_tensors._on_host([net[index] for index in of]):
        loss = net(x).square().sum()
    loss.backward()
    other(x).square().sum().backward()
    assert all(map(torch.equal, gradients(net), gradients(other)))
    assert not any(part._forward_hooks for part in net.modules())


@pytest.mark.parametrize("modules", [(), ("0",), ("*",)])
def test_a_spool_takes_what_the_chosen_modules_save(modules: tuple[str, ...], tmp_path: Path) -> None:
    net, x = model(), torch.randn(3, 4)
    spec = SavedTensorsSpec(store="spool", budget_bytes=0, min_bytes=0, modules=modules)
    saved = SavedTensors(net, spec, tmp_path, {})
    with saved.forward():
        loss = net(x).sum()
    taken, _ = saved.counts()
    loss.backward()
    saved.close()
    whole = 4 * (3 * 4 + 3 * 6 * 3)  # the input, and each value behind it that a derivative needs
    assert (taken >= whole) == (modules != ("0",))
    assert taken > 0


def test_the_last_tensors_of_a_pass_stay_on_a_device(tmp_path: Path) -> None:
    net, other, x = model(), model(), torch.randn(3, 4)
    other(x).square().sum().backward()
    moved = {}
    with all_tensors_on_a_device() as copier:
        for device_bytes in (0, 1 << 20):
            spec = SavedTensorsSpec(store="spool", min_bytes=0, device_bytes=device_bytes)
            saved = SavedTensors(net, spec, tmp_path, {})
            for _ in range(2):  # how much a pass saves is known from the one before
                copier.log.clear()
                net.zero_grad()
                with saved.forward():
                    loss = net(x).square().sum()
                loss.backward()
                assert all(map(torch.equal, gradients(net), gradients(other)))
            saved.close()
            moved[device_bytes] = len(copier.log)
    assert moved[0] > moved[1 << 20] == 0


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = SavedTensorsSpec(store="spool", modules=("layer9",))
    with pytest.raises(ServiceError, match=r"saved_tensors.modules\[0\]: 'layer9' matches no module"):
        SavedTensors(model(), spec, tmp_path, {})


def test_a_trainer_that_cannot_be_built_leaves_no_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = Mock()
    monkeypatch.setattr(saved_tensors, "SPOOLING", spools)
    with pytest.raises(ServiceError, match="'layer9' matches no module"):
        core_of(tiny(), tmp_path, saved_tensors={"store": "spool"}, activation_checkpointing=["layer9"])
    assert spools.begin.call_count == spools.end.call_count == 1
    assert not any(tmp_path.iterdir())


def test_spools_are_counted_as_they_go_on_and_when_they_are_gone() -> None:
    totals, one, other = SpoolTotals(), Report(), Report(written_bytes=5)
    totals.begin(one)
    totals.begin(other)
    one.written_bytes, one.read_bytes = 10, 3
    one.stalled(0.5)
    assert totals.sums() == (15, 3, 0.5)
    totals.end(one)
    assert totals.sums() == (15, 3, 0.5)
    one.written_bytes = 100  # it is closed: whatever it counts now is nobody's
    other.read_bytes = 1
    assert totals.sums() == (15, 4, 0.5)


def test_a_spool_that_ends_twice_counts_once() -> None:
    totals, report = SpoolTotals(), Report(written_bytes=7)
    totals.begin(report)
    totals.end(report)
    totals.end(report)
    assert totals.sums() == (7, 0, 0.0)


def test_equal_reports_are_not_mixed_up() -> None:
    totals, one, other = SpoolTotals(), Report(), Report()
    totals.begin(one)
    totals.begin(other)
    totals.end(other)
    one.written_bytes = 9
    assert totals.sums()[0] == 9
