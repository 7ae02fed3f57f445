"""Messages of ranks: the values come back, and no bytes are ever run."""

import pickle
from pathlib import Path

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.storage.durable import DamagedError
from trocar_server.training.fit.ranks.rank_messages import Shard, ShardResult, decode, encode
from trocar_server.training.losses.batch import Batch


class Canary:
    """A pickle that touches a file when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_shard_comes_back() -> None:
    images = torch.arange(12.0).reshape(2, 6)[:, ::2]
    batch = Batch((images, ["a", "b"]), {"mask": {"inner": (images > 3,)}}, {"": torch.tensor([1, 2])}, 2)
    found = Shard.of_message(decode(encode(Shard(batch, 7).to_message())))
    assert found.seed == 7
    assert found.batch.size == 2
    assert torch.equal(found.batch.args[0], images)
    assert found.batch.args[1] == ["a", "b"]
    assert torch.equal(found.batch.kwargs["mask"]["inner"][0], images > 3)
    assert found.batch.targets[""].tolist() == [1, 2]


@pytest.mark.parametrize(
    "result",
    [
        ShardResult(0.1, {"loss": 0.3}, {0: 5, 7: 1}, frozenset({"fc.weight"})),
        ShardResult(float("inf"), not_finite="the loss"),
        ShardResult(0.0, problem=(ErrorReason.OUT_OF_MEMORY, "too large")),
    ],
)
def test_a_result_comes_back(result: ShardResult) -> None:
    assert ShardResult.of_message(decode(encode(result.to_message()))) == result


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    canary = tmp_path / "sang"
    with pytest.raises(DamagedError):
        decode(pickle.dumps(Canary(canary)))
    assert not canary.exists()


def test_a_message_that_is_cut_off_is_refused() -> None:
    data = encode({"value": torch.zeros(8)})
    for length in (0, 7, 20, len(data) - 1):
        with pytest.raises(DamagedError):
            decode(data[:length])
