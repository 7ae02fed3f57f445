"""Prompts of a run: each a request of its own."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trocar_server.engine.generate.prompts import split_prompts
from trocar_server.engine.generate.sampling import sequence_seed
from trocar_server.engine.request.plan import Payloads, Plan, TensorInput, TensorListInput
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import AudioInput, AudioSpec, TextEntry, TextInput, TextOptions

EDITS = [np.arange(4, dtype=np.uint8)]


def plan(*, inputs: tuple[Any, ...] = (), unprocessed: tuple[Any, ...] = ()) -> Plan:
    return Plan("llama", (), inputs, 4096, unprocessed=unprocessed)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def test_each_text_keeps_the_options_of_the_batch() -> None:
    options = TextOptions(max_tokens=9, add_special_tokens=False)
    texts = TextInput("", (TextEntry("text", "one"), TextEntry("ids", (5, 6))), options)
    split = split_prompts(plan(unprocessed=(texts,)), Payloads(edits=EDITS), 1)
    own = [one.unprocessed for one, _ in split]
    assert own == [(TextInput("", (entry,), options),) for entry in texts.entries]
    assert all(payloads.edits is EDITS for _, payloads in split)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_each_row_of_an_array_is_a_prompt(dtype: type) -> None:
    array: NDArray[Any] = np.arange(6, dtype=dtype).reshape(2, 3)
    kind = torch.from_numpy(array).dtype
    given = plan(inputs=(TensorInput("", kind, array.shape),))
    split = split_prompts(given, Payloads(inputs=[as_bytes(array)]), 1)
    assert [one.inputs for one, _ in split] == [(TensorInput("input_ids", kind, (1, 3)),)] * 2
    assert [payloads.inputs[0].view(dtype).tolist() for _, payloads in split] == array.tolist()


def test_each_array_of_a_list_is_a_prompt() -> None:
    arrays = [np.array([1, 2]), np.array([3, 4, 5])]
    given = plan(inputs=(TensorListInput("", torch.int64, ((2,), (3,))),))
    split = split_prompts(given, Payloads(inputs=list(map(as_bytes, arrays))), 1)
    assert [one.inputs[0] for one, _ in split] == [
        TensorInput("input_ids", torch.int64, (1, count)) for count in (2, 3)
    ]
    assert [payloads.inputs[0].view(np.int64).tolist() for _, payloads in split] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("given", "sample_count", "problem"),
    [
        (plan(), 1, "only input"),
        (plan(inputs=(TensorInput("pixel_values", torch.int64, (1, 3)),)), 1, "only input"),
        (plan(inputs=(TensorInput("", torch.float32, (1, 3)),)), 1, "whole numbers"),
        (plan(inputs=(TensorInput("", torch.int64, (3,)),)), 1, "shape"),
        (plan(inputs=(TensorInput("", torch.int64, (0, 3)),)), 1, "at least one"),
        (plan(inputs=(TensorListInput("", torch.int64, ((1, 2), (1, 3))),)), 1, "each is one prompt"),
        (plan(unprocessed=(AudioInput("", (AudioSpec(4),), 0),)), 1, "a text, a chat or token ids"),
        (plan(unprocessed=(TextInput("", (TextEntry("text", "one"),) * 3),)), 342, "1,026 texts"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(given: Plan, sample_count: int, problem: str) -> None:
    with pytest.raises(ServiceError, match=problem):
        split_prompts(given, Payloads(inputs=[np.zeros(24, np.uint8)]), sample_count)


def test_sequences_have_seeds_of_their_own() -> None:
    triples = list(product(range(5), repeat=3))
    seeds = {sequence_seed(*triple) for triple in triples}
    assert len(seeds) == 125
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert sequence_seed(7, 0, 1) == sequence_seed(7, 0, 1)
