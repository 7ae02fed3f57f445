"""What the clients of a load send, and what they read from replies."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.types import ServerTiming
from trocar._bench.records import Answer
from trocar._bench.served import Served, answer_of
from trocar._request.execution import ExecutionInfo
from trocar._transport.channel import ConnectOptions

REQUEST = Served(ConnectOptions("localhost:1", 1.0, None, None, 0), "m", ("conv",), 2, (3, 4, 4))

TIMING = ServerTiming(0.25, 0.5)


@dataclass(frozen=True)
class Maps:
    execution: ExecutionInfo
    timing: ServerTiming = TIMING


def files(folder: Path, count: int) -> tuple[Path, ...]:
    paths = tuple(folder / str(index) for index in range(count))
    for path in paths:
        path.write_bytes(path.name.encode())
    return paths


def test_each_client_has_random_inputs_of_its_own_that_depend_on_the_seed() -> None:
    (first,), (second,), (again,) = (REQUEST.batches(0), REQUEST.batches(1), REQUEST.batches(0))
    assert first.shape == (2, 3, 4, 4)
    assert first.dtype == np.float32
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, replace(REQUEST, seed=1).batches(0)[0])


def test_images_go_out_in_turn_from_another_one_for_each_client(tmp_path: Path) -> None:
    request = replace(REQUEST, images=files(tmp_path, 5))
    assert request.batches(0) == [[b"0", b"1"], [b"2", b"3"]]
    assert request.batches(1) == [[b"2", b"3"], [b"4", b"0"]]


def test_few_images_fill_a_large_batch(tmp_path: Path) -> None:
    request = replace(REQUEST, images=files(tmp_path, 2), batch=5)
    assert request.batches(0) == [[b"0", b"1", b"0", b"1", b"0"]]


def test_replies_say_how_they_were_made() -> None:
    maps: Any = Maps(ExecutionInfo("fast", "torch", 4, is_cached=True))
    assert answer_of(maps) == Answer(0.25, 0.5, "fast", "torch", is_cached=True, row_count=4)
