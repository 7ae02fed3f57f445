"""Helper processes: loads by several of them, local passes, and what happens when one ends."""

import signal
import time

import pytest
import torch

from tests.support.models.tiny_models import Plain
from tests.unit.client._bench.targets import Broken, Named
from trocar._bench import process
from trocar._bench.load import Load
from trocar._bench.local_passes import Local, LocalJob, Passes
from trocar._bench.process import Helper, HelperError


@pytest.mark.parametrize(("clients", "processes"), [(1, 1), (5, 2), (2, 9)])
def test_every_client_makes_its_calls_whatever_process_it_is_in(clients: int, processes: int) -> None:
    with Load(Named(), clients, processes) as load:
        records = load.closed(0.0, most_calls=3)
    assert sorted(record.client for record in records) == sorted([*range(clients)] * 3)
    assert all(record.answer.queue_s == record.client for record in records)


def test_an_open_loop_over_several_processes_makes_every_call_once() -> None:
    due = [index / 1000 for index in range(20)]
    with Load(Named(), 4, 2) as load:
        records = load.open(due)
    assert len({record.due_s for record in records}) == 20
    start = min(record.due_s for record in records)
    assert sorted(record.due_s - start for record in records) == pytest.approx(due)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(HelperError, match="no such socket"), Load(Broken(), 2):
        pass


def test_local_passes_are_made_at_any_module_of_a_torchvision_model() -> None:
    passes = Passes()
    for paths in (("",), ("avgpool", "layer1.0.conv1")):
        assert len(passes.measure(LocalJob("resnet18", paths, (1, 3, 32, 32), 0.0, most_passes=2))) == 2


def test_a_local_pass_ends_after_the_last_module_that_is_wanted() -> None:
    model, called = Plain().eval(), []
    model.fc.register_forward_hook(lambda *_: called.append("fc"))
    extract = Passes().extractor(model, ["conv"])
    assert extract(torch.ones(1, 3, 8, 8))["conv"].shape == (1, 4, 8, 8)
    assert called == []


def test_a_module_that_is_no_node_of_the_graph_is_watched_by_a_hook() -> None:
    model = Plain().eval()
    assert Passes().extractor(model, ["conv", "unused"]) is model
    assert len(model.unused._forward_hooks) == 1


def test_a_local_pass_that_fails_says_so_and_the_next_one_is_made() -> None:
    with Local() as local:
        with pytest.raises(HelperError, match="resnet19"):
            local.measure(LocalJob("resnet19", ("layer1",), (1, 3, 32, 32), 0.0))
        with pytest.raises(HelperError, match="layer9"):
            local.measure(LocalJob("resnet18", ("layer9",), (1, 3, 32, 32), 0.0))
        assert local.measure(LocalJob("resnet18", ("layer1",), (1, 3, 32, 32), 0.0, most_passes=1))


def test_a_process_that_is_busy_ends_with_the_failure_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CLOSE_LIMIT_S", 1000)
    with pytest.raises(ZeroDivisionError), Helper("tests.unit.client._bench.silent"):
        raise ZeroDivisionError


def test_a_load_that_is_interrupted_does_not_wait_for_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(Named(), 1)
    load._helpers[0]._process.send_signal(signal.SIGSTOP)  # it would end when it is asked to
    monkeypatch.setattr(process, "_CLOSE_LIMIT_S", 30)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), load:
        raise KeyboardInterrupt
    assert time.monotonic() - began < 20
