import pytest
import torch

from trocar_server.training.datasets.order import (
    batch_count,
    batches,
    epoch_order,
    random_numbers,
    split_order,
)


def test_order_is_randperm_with_the_epochs_seed() -> None:
    for epoch in range(3):
        expected = torch.randperm(20, generator=torch.Generator().manual_seed(7 + epoch))
        assert torch.equal(epoch_order(20, 7, epoch), expected)
    assert torch.equal(epoch_order(4, 7, 1, shuffle=False), torch.arange(4))


def test_largest_seed_has_later_epochs() -> None:
    assert sorted(epoch_order(5, (1 << 63) - 1, 3).tolist()) == list(range(5))


def test_batches_cover_the_order() -> None:
    for count, size in ((10, 4), (8, 4), (3, 8), (1, 1)):
        order = epoch_order(count, 0, 0)
        for drop in (False, True):
            parts = batches(order, size, drop_last=drop)
            assert len(parts) == batch_count(count, size, drop_last=drop)
            kept = count if not drop else count // size * size
            assert torch.equal(torch.cat([order[:0], *parts]), order[:kept])


def test_random_numbers_are_put_back() -> None:
    state = torch.get_rng_state()
    with random_numbers(5):
        mine = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(mine, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(
    ("count", "share", "kept"), [(100, 0.29, 29), (10, 0.1, 1), (9, 0.1, 0), (22, 0.3, 6)]
)
def test_a_split_is_the_end_of_a_random_order(count: int, share: float, kept: int) -> None:
    train, evaluation = split_order(count, share, seed=7)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
    assert len(evaluation) == kept
    assert set(evaluation.tolist()) == set(order.tolist()[count - kept :])
    assert sorted([*train.tolist(), *evaluation.tolist()]) == list(range(count))
    assert train.tolist() == sorted(train.tolist())
