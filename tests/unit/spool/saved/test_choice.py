from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.spool.steps import are_equal, batch, gradients, open_spool, small_model
from trocar_server.spool.saved.choice import NO_OPERATION, all_of, made_by

VALUE_BYTES = 16 * 8 * 16 * 16 * 4


def test_the_operation_is_the_one_that_made_the_tensor() -> None:
    x = torch.randn(2, 3, 8, 8)
    made = nn.Conv2d(3, 4, 3)(x)
    choose = made_by(["ConvolutionBackward0"])
    assert choose(made)
    assert not choose(made.relu())
    assert not choose(made.flatten(1))  # a view of it is made by the view
    assert not choose(made.detach())
    assert not choose(x)


def test_the_empty_name_is_for_what_no_operation_made() -> None:
    choose = made_by([NO_OPERATION])
    weight = torch.randn(3, requires_grad=True)
    assert choose(torch.randn(3))
    assert choose(weight)
    assert not choose(weight * 2)


def test_a_change_in_place_counts_as_the_operation() -> None:
    value = nn.Linear(3, 3)(torch.randn(2, 3)).relu_()
    assert made_by(["ReluBackward0"])(value)
    assert not made_by(["AddmmBackward0"])(value)


def test_one_string_is_refused() -> None:
    with pytest.raises(TypeError, match=r"for example \['TanhBackward0'\]"):
        made_by("TanhBackward0")


def test_all_predicates_must_agree() -> None:
    assert all_of(None, None) is None
    both = all_of(lambda tensor: tensor.numel() > 2, None, lambda tensor: tensor.dim() == 1)
    assert both is not None
    assert [both(torch.zeros(shape)) for shape in [(3,), (2,), (3, 1)]] == [True, False, False]


def test_only_what_the_operations_made_is_written(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    # Tanh and GELU: autograd saves Tanh's output, and GELU's input, which a convolution made.
    cases = {("TanhBackward0",): 1, ("TanhBackward0", "ConvolutionBackward0"): 2, ("?",): 0}
    for names, count in cases.items():
        with open_spool(tmp_path, operations=names, keep=[model]) as spool:
            assert are_equal(gradients(model, spool), expected)
            assert spool.report().unique_bytes == count * VALUE_BYTES


def test_operations_and_a_predicate_go_together(tmp_path: Path) -> None:
    model = small_model()
    with open_spool(tmp_path, operations=["TanhBackward0"], choose=lambda tensor: tensor.dim() == 2) as spool:
        gradients(model, spool)
        assert spool.report().unique_bytes == 0


def test_the_smallest_size_that_is_written_counts_itself(tmp_path: Path) -> None:
    for min_bytes, is_written in ((VALUE_BYTES, True), (VALUE_BYTES + 1, False)):
        with open_spool(tmp_path, min_bytes=min_bytes) as spool:
            with spool:
                loss = batch().new_zeros(16, 8, 16, 16).requires_grad_().tanh().sum()
            loss.backward()
            assert (spool.report().unique_bytes > 0) is is_written
