import torch

from tests.unit.models.conftest import load
from trocar_server.models.hosted import count_bytes


def test_example_inputs_are_the_same_at_every_call() -> None:
    hosted = load("squeezenet1_1=random:0")
    (first,), (second,) = hosted.example_inputs(2), hosted.example_inputs(2)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert torch.equal(first, second)
    assert first.shape == (2, 3, 224, 224)


def test_detection_takes_a_list_of_images() -> None:
    hosted = load("ssdlite320_mobilenet_v3_large=random:0")
    (images,) = hosted.example_inputs(2)
    assert hosted.takes_list
    assert isinstance(images, list)
    assert [tuple(image.shape) for image in images] == [(3, 224, 224)] * 2


def test_optical_flow_takes_two_different_batches() -> None:
    first, second = load("raft_small=random:0").example_inputs(2)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.shape == second.shape == (2, 3, 128, 128)
    assert not torch.equal(first, second)


def test_shared_storage_counts_once() -> None:
    whole = torch.zeros(10)
    assert count_bytes([whole, whole[2:], whole.view(2, 5), torch.zeros(1)]) == 44
