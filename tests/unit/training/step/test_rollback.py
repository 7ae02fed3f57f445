"""A stream of random numbers of one's own."""

import pytest
import torch

from trocar_server.training.step.rollback import RandomStream


def test_it_is_what_torch_draws_after_the_seed() -> None:
    stream = RandomStream(5, torch.device("cpu"))
    found = []
    for _ in range(3):
        with stream.in_place():
            found.append(torch.rand(4))
        torch.rand(7)  # somebody else's
    torch.manual_seed(5)
    assert torch.equal(torch.cat(found), torch.rand(12))


def test_what_fails_or_is_not_kept_moves_nothing() -> None:
    stream = RandomStream(5, torch.device("cpu"))
    with pytest.raises(KeyError), stream.in_place():
        _draw_and_fail()
    with stream.in_place(is_kept=False):
        torch.rand(1)
    with stream.in_place():
        found = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(1))


def test_others_see_nothing_of_it() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with pytest.raises(KeyError), RandomStream(5, torch.device("cpu")).in_place():
        _draw_and_fail()
    assert torch.equal(torch.rand(2), expected)


def test_it_goes_on_from_its_state() -> None:
    one, other = RandomStream(5, torch.device("cpu")), RandomStream(6, torch.device("cpu"))
    with one.in_place():
        torch.rand(3)
    other.load(one.state())
    with one.in_place():
        expected = torch.randn(5)
    with other.in_place():
        assert torch.equal(torch.randn(5), expected)


def _draw_and_fail() -> None:
    torch.rand(9)
    raise KeyError
