"""Texts that end where a direction reads enough; hooks while transformers generates are the oracle."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.causal_models import TEXTS, Hooked, save_causal
from tests.support.servers.running_server import running_server
from trocar.errors import (
    DirectionMismatchError,
    EditNotPossibleError,
    InvalidArgumentError,
    UnknownDirectionError,
)

BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "mixtral": "model.layers.1"}
EARLIER = "model.layers.0"
COUNT = 12
GREEDY: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": []}
RANDOM = np.random.default_rng(5)
READ, PUSH, TWO = RANDOM.normal(size=16), RANDOM.normal(size=16) * 4, RANDOM.normal(size=(2, 16))
OF_HEAD, BIAS = RANDOM.normal(size=300), 0.25
NEVER = 1e9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stop_gates")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    return {family: save_causal(family, folders / family) for family in BLOCKS}


@pytest.fixture(scope="module")
def client(folders: Path, models: dict[str, Any]) -> Iterator[trocar.Client]:
    tables = {name: {"source": f"hf:{folders / name}"} for name in models}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        for name in models:
            connected.store_direction(name, "warm", BLOCKS[name], trocar.Direction.of(READ, BIAS))
            connected.store_direction(name, "two", BLOCKS[name], trocar.Direction.of(TWO))
        connected.store_direction("llama", "said", "lm_head", trocar.Direction.of(OF_HEAD))
        connected.store_direction("mixtral", "mixed", "model.layers.0.mlp", trocar.Direction.of(READ))
        connected.store_direction("llama", "both", "layer[0]", trocar.Direction.of(READ))
        connected.store_direction("llama", "both", "layer[1]", trocar.Direction.of(READ))
        yield connected


@pytest.fixture(scope="module")
def prompts(client: trocar.Client) -> list[list[int]]:
    return [list(client.generate("llama", text, max_new_tokens=1).prompt_ids) for text in TEXTS[:3]]


@dataclass(frozen=True)
class Read:
    """A text without a gate, and the reading of each position whose logits chose one of its tokens."""

    tokens: list[int]
    numbers: list[float]

    def until(self, bound: float) -> tuple[list[int], str]:
        """Return the tokens up to the first reading above a bound, and why the text ends."""
        for index, number in enumerate(self.numbers):
            if number > bound:
                return self.tokens[: index + 1], "gate"
        return self.tokens, "length"

    @property
    def bounds(self) -> list[float]:
        """Bounds that no reading is near: below all of them, between each two, above all."""
        ordered = sorted({*self.numbers})
        assert len(ordered) > COUNT // 2  # the text does not repeat itself
        return [ordered[0] - 1, *((one + other) / 2 for one, other in pairwise(ordered)), ordered[-1] + 1]


def read(model: Any, ids: list[int], block: str, change: dict[str, Any] | None = None) -> Read:
    """Generate with transformers, and read the direction at a block's output."""
    with Hooked(model, [block], change) as hooked, torch.inference_mode():
        given = torch.tensor([ids])
        settings: Any = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0}
        whole = model.generate(given, attention_mask=torch.ones_like(given), **settings)
    numbers = hooked.rows(block).astype(np.float64) @ READ + BIAS
    return Read(whole[0, len(ids) :].tolist(), numbers[len(ids) - 1 :].tolist())


def gate(block: str = "", /, **limits: float) -> Any:
    return trocar.gate("warm", block, **limits)


@pytest.mark.parametrize("family", BLOCKS)
def test_a_text_ends_where_the_direction_first_reads_enough(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]], family: str
) -> None:
    block, ends = BLOCKS[family], set()
    for ids in prompts:
        expected = read(models[family], ids, block)
        for bound in expected.bounds:
            run = client.generate(family, [ids], stop_when=gate(block, above=bound), **GREEDY)
            assert (list(run.token_ids), run.finish_reason) == expected.until(bound)
            ends.add(len(run.token_ids))
    assert len(ends) > 3
    assert {1, COUNT} <= ends  # at the prompt's last position, and never


def test_a_readout_of_the_finished_text_tells_the_same(
    client: trocar.Client, prompts: list[list[int]]
) -> None:
    """No position before the last one that was computed is above the bound, from the prompt's last on."""
    readout, name = trocar.readout("warm", BLOCKS["llama"]), f"{BLOCKS['llama']}:warm"
    lengths = set()
    for ids, bound in product(prompts, (-4.0, 0.0, 2.0, 4.0, 6.0, 8.0)):
        run = client.generate("llama", [ids], taps=[readout], stop_when=gate(above=bound), **GREEDY)
        of_text = client.extract("llama", run.as_inputs(), [readout])[name][0, len(ids) - 1 : -1, 0]
        np.testing.assert_allclose(run[name][len(ids) - 1 :, 0], of_text, rtol=1e-4, atol=1e-4)
        is_open = run[name][len(ids) - 1 :, 0] > bound
        assert not is_open[:-1].any()
        assert is_open[-1] == (run.finish_reason == "gate")
        lengths.add(len(of_text))
    assert len(lengths) > 2


@pytest.mark.parametrize("limits", [{"below": 0.0}, {"above": -2.0, "below": 3.0}])
def test_limits_are_those_of_gates(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]], limits: dict[str, float]
) -> None:
    for ids in prompts:
        expected = read(models["llama"], ids, BLOCKS["llama"])
        low, high = limits.get("above", -np.inf), limits.get("below", np.inf)
        count = next((i + 1 for i, number in enumerate(expected.numbers) if low < number < high), COUNT)
        run = client.generate("llama", [ids], stop_when=gate(**limits), **GREEDY)
        assert list(run.token_ids) == expected.tokens[:count]


def test_edits_before_the_gate_are_in_what_it_reads(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]]
) -> None:
    vector = torch.tensor(PUSH).float()
    always = trocar.positions(when=trocar.gate("both", EARLIER, above=-NEVER))
    for place, positions in ((EARLIER, None), (BLOCKS["llama"], None), (EARLIER, always)):
        edit = trocar.edit(place, "steer", PUSH, positions=positions)
        expected = read(models["llama"], prompts[1], BLOCKS["llama"], {place: lambda value: value + vector})
        plain = read(models["llama"], prompts[1], BLOCKS["llama"])
        for bound in expected.bounds[::2]:
            stop = gate(above=bound)
            run = client.generate("llama", [prompts[1]], edits=[edit], stop_when=stop, **GREEDY)
            assert (list(run.token_ids), run.finish_reason) == expected.until(bound)
            baseline = run.baseline
            assert (list(baseline.token_ids), baseline.finish_reason) == plain.until(bound)
            computed = len(prompts[1]) + len(run.token_ids) - 1
            (count,) = run.edit_counts
            assert count.prompt + count.generated == computed


def test_each_text_ends_by_itself(client: trocar.Client, prompts: list[list[int]]) -> None:
    """Drawn texts: each is the beginning of the one without a gate, up to its own first reading."""
    name = f"{BLOCKS['llama']}:warm"
    options: dict[str, Any] = {**GREEDY, "n": 3, "temperature": 1.3, "seed": 3, "logprobs": 2}
    taps: list[Any] = [BLOCKS["llama"], trocar.readout("warm", BLOCKS["llama"])]
    free = client.generate("llama", prompts, taps=taps, **options)
    numbers = [one[name][len(one.prompt_ids) - 1 :, 0].tolist() for one in free.sequences]
    bound = float(np.median(np.array(numbers).max(axis=1)))
    run = client.generate("llama", prompts, taps=taps, stop_when=gate(above=bound), **options)
    assert {one.finish_reason for one in run.sequences} == {"gate", "length"}
    for one, whole, own in zip(run.sequences, free.sequences, numbers, strict=True):
        tokens, reason = Read(list(whole.token_ids), own).until(bound)
        assert (list(one.token_ids), one.finish_reason) == (tokens, reason)
        assert (one.prompt, one.sample) == (whole.prompt, whole.sample)
        assert one.logprobs == whole.logprobs[: len(tokens)]
        assert one.values == whole.values
        np.testing.assert_array_equal(one[BLOCKS["llama"]], whole[BLOCKS["llama"]][: len(one[name])])
        assert len(one[name]) == len(one.prompt_ids) + len(tokens) - 1
    assert run.expansions == free.expansions
    assert run.as_inputs() == [[*one.prompt_ids, *one.token_ids] for one in run.sequences]


def test_the_head_is_read_at_the_prompts_last_position(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]]
) -> None:
    ids = prompts[0]
    with torch.inference_mode():
        number = float(models["llama"](torch.tensor([ids])).logits[0, -1].double() @ torch.tensor(OF_HEAD))
    for bound, is_open in ((number - 0.1, True), (number + 0.1, False)):
        stop = trocar.gate("said", above=bound, below=number + 0.2)
        run = client.generate("llama", [ids], stop_when=stop, **GREEDY)
        assert (len(run.token_ids) == 1) == is_open


def test_other_ends_of_a_text_come_before_a_gate(client: trocar.Client, prompts: list[list[int]]) -> None:
    always = gate(above=-NEVER)
    first = client.generate("llama", [prompts[0]], stop_when=always, **GREEDY)
    assert (len(first.tokens), first.finish_reason) == (1, "gate")
    assert first.text  # it has the token
    own = {**GREEDY, "stop_token_ids": list(first.token_ids)}
    ended = client.generate("llama", [prompts[0]], stop_when=always, **own)
    assert (ended.token_ids, ended.finish_reason, ended.text) == (first.token_ids, "stop_token", "")
    free = client.generate("llama", TEXTS[0], **GREEDY)
    stop = free.text[:1]
    ended = client.generate("llama", TEXTS[0], stop_when=always, stop=stop, **GREEDY)
    assert (len(ended.tokens), ended.finish_reason, ended.text) == (1, "stop_string", "")
    last = client.generate("llama", TEXTS[0], stop_when=always, **{**GREEDY, "max_new_tokens": 1})
    assert last.finish_reason == "gate"
    never = client.generate("llama", TEXTS[0], stop_when=gate(above=NEVER), **GREEDY)
    assert (never.token_ids, never.finish_reason) == (free.token_ids, "length")


def test_options_tell_the_gate(client: trocar.Client) -> None:
    run = client.generate("llama", TEXTS[0], stop_when=gate("layer[1]", above=NEVER), **GREEDY)
    assert run.options["stop_when"] == gate(BLOCKS["llama"], above=NEVER)
    options: dict[str, Any] = dict(run.options)
    again = client.generate("llama", TEXTS[0], **options)
    assert again.token_ids == run.token_ids
    assert client.generate("llama", TEXTS[0], **GREEDY).options["stop_when"] is None


def test_a_trainers_texts_end_by_directions_of_its_own(
    client: trocar.Client, prompts: list[list[int]]
) -> None:
    with client.train("llama", losses="causal_lm", optimizer=trocar.training.adamw(lr=0.01)) as trainer:
        trainer.step(TEXTS[0])
        direction = trocar.Direction.of(READ, BIAS)
        client.store_direction(trainer.trainer_id, "warm", BLOCKS["llama"], direction)
        readout = trocar.readout("warm", BLOCKS["llama"])
        free = trainer.generate([prompts[0]], taps=[readout], **GREEDY)
        numbers = free[free.values[0]][len(prompts[0]) - 1 :, 0].tolist()
        expected = Read(list(free.token_ids), numbers)
        for bound in expected.bounds[::3]:
            run = trainer.generate([prompts[0]], stop_when=gate(above=bound), **GREEDY)
            assert (list(run.token_ids), run.finish_reason) == expected.until(bound)
        trainer.step(TEXTS[1])
        with pytest.raises(DirectionMismatchError, match="weights, code or settings have changed"):
            trainer.generate([prompts[0]], stop_when=gate(above=0), **GREEDY)


def test_what_cannot_end_a_text_is_refused(client: trocar.Client) -> None:
    def generate(stop: Any) -> Any:
        return client.generate("llama", TEXTS[0], stop_when=stop, **GREEDY)

    with pytest.raises(UnknownDirectionError, match="cold"):
        generate(trocar.gate("cold", above=0))
    with pytest.raises(DirectionMismatchError, match="has 2 vectors, and a gate needs one"):
        generate(trocar.gate("two", above=0))
    with pytest.raises(DirectionMismatchError, match=r"was not fitted at 'model.layers.0', but at"):
        generate(gate("layer[0]", above=0))
    with pytest.raises(InvalidArgumentError, match="'both' has 2 places; name one"):
        generate(trocar.gate("both", above=0))
    with pytest.raises(
        InvalidArgumentError, match=r"'model.layers.0.mlp' of shape .* not one vector for each"
    ):
        client.generate("mixtral", TEXTS[0], stop_when=trocar.gate("mixed", above=0), **GREEDY)
    edit = trocar.edit("layer[0]", "zero", positions=trocar.positions(when=gate(above=0)))
    with pytest.raises(EditNotPossibleError, match="computed later in the pass"):
        client.generate("llama", TEXTS[0], edits=[edit], stop_when=gate(above=0), **GREEDY)
