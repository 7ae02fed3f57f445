"""Taps and edits at positions of a text, against hooks that know the position of each pass."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import running_server

COUNT = 10
BLOCKS = {"llama": "model.layers.{}", "gpt2": "transformer.h.{}"}
VECTOR = torch.randn(16, generator=torch.Generator().manual_seed(5)) * 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("positions")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    return {family: save_causal(family, folders / family) for family in BLOCKS}


@pytest.fixture(scope="module")
def client(folders: Path, models: dict[str, Any]) -> Iterator[trocar.Client]:
    tables = {family: {"source": f"hf:{folders / family}"} for family in models}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def steered(model: Any, path: str, ids: list[int], chosen: set[int], *, cached: bool) -> list[int]:
    """Generate with a vector added at chosen positions, by hooks that count the positions."""
    begun = [0]

    def add(_: Any, __: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        first = begun[0]
        rows = [row for row in range(value.shape[1]) if first + row in chosen]
        begun[0] += value.shape[1] if cached else 0
        changed = value.clone()
        changed[:, rows] += VECTOR
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = model.get_submodule(path).register_forward_hook(add)
    try:
        found = list(ids)
        with torch.inference_mode():
            if cached:
                given = torch.tensor([ids])
                settings = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None}
                mask = torch.ones_like(given)
                whole = model.generate(given, attention_mask=mask, pad_token_id=0, use_cache=True, **settings)
                return whole[0, len(ids) :].tolist()  # type: ignore[no-any-return]
            for _ in range(COUNT):
                logits = model(torch.tensor([found]), use_cache=False).logits[0, -1]
                found.append(int(logits.float().argmax()))
        return found[len(ids) :]
    finally:
        handle.remove()


def drawn(random: Random, prompt: int) -> tuple[Any, set[int]]:
    """Draw positions, and the absolute ones that they stand for."""
    clauses: dict[str, Any] = {}
    chosen: set[int] = set()
    for name, count, first in (("prompt", prompt, 0), ("generated", COUNT, prompt)):
        kind = random.choice(["all", "some", "slice", "none"])
        if kind == "all":
            clauses[name] = "all"
            chosen |= set(range(first, first + count))
        elif kind == "some":
            own = random.sample(range(count), 3)
            clauses[name] = [place - count if name == "prompt" and place % 2 else place for place in own]
            chosen |= {first + place for place in own}
        elif kind == "slice":
            start = random.randrange(count - 1)
            clauses[name] = slice(start, None, 2)
            chosen |= set(range(first + start, first + count, 2))
    if not clauses:
        return trocar.positions(generated=[0]), {prompt}
    return trocar.positions(**clauses), chosen


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("seed", range(6))
def test_an_edit_acts_at_its_positions_with_and_without_a_cache(
    client: trocar.Client, models: dict[str, Any], family: str, seed: int
) -> None:
    path = BLOCKS[family].format(0)
    prompt = client.generate(family, TEXTS[seed % 3], max_new_tokens=1).prompt_ids
    positions, chosen = drawn(Random(f"{family}{seed}"), len(prompt))
    edit = trocar.edit(path, "add", VECTOR.numpy(), positions=positions)
    run = client.generate(
        family, [list(prompt)], max_new_tokens=COUNT, stop_token_ids=[], edits=[edit], taps=[path]
    )
    plain = client.generate(family, [list(prompt)], max_new_tokens=COUNT, stop_token_ids=[], taps=[path])
    assert list(run.token_ids) == steered(models[family], path, list(prompt), chosen, cached=True)
    assert list(run.token_ids) == steered(models[family], path, list(prompt), chosen, cached=False)
    (count,) = run.edit_counts
    assert count.prompt == len(chosen & set(range(len(prompt))))
    assert count.generated == len(chosen & set(range(len(prompt), len(prompt) + COUNT - 1)))
    same = [row for row in range(len(prompt)) if row not in chosen]
    np.testing.assert_array_equal(run[path][same], plain[path][same])


@pytest.mark.parametrize("seed", range(4))
def test_a_tap_has_the_rows_of_its_positions(client: trocar.Client, seed: int) -> None:
    path = BLOCKS["llama"].format(1)
    whole = client.generate("llama", TEXTS[0], max_new_tokens=COUNT, stop_token_ids=[], taps=[path])
    positions, chosen = drawn(Random(seed), len(whole.prompt_ids))
    tap = trocar.tap(path, positions=positions)
    run = client.generate("llama", TEXTS[0], max_new_tokens=COUNT, stop_token_ids=[], taps=[tap])
    computed = [place for place in sorted(chosen) if place < len(whole.prompt_ids) + COUNT - 1]
    np.testing.assert_array_equal(run[path], whole[path][computed])
    assert run.positions(path) == tuple(computed)


@pytest.mark.parametrize(
    ("positions", "problem"),
    [
        ({"prompt": [500]}, "outside of its"),
        ({"prompt": slice(500, None)}, "selects none"),
        ({"generated": [COUNT]}, "outside of its"),
        ({"generated": [COUNT - 1]}, "from which nothing is computed"),
        ({"spans": "absent"}, "the text is not in it"),
        ({"token_ids": 2}, "none of its tokens has the id 2"),
        ({"roles": "user"}, "not a chat"),
        ({"generated": "all", "but_not": trocar.positions(generated="all")}, "leaves no token"),
    ],
)
def test_a_clause_that_selects_nothing_is_refused(
    client: trocar.Client, positions: dict[str, Any], problem: str
) -> None:
    chosen = trocar.positions(**positions)
    for options in (
        {"taps": [trocar.tap("model.layers.1", positions=chosen)]},
        {"edits": [trocar.edit("model.layers.1", "zero", positions=chosen)]},
    ):
        given: dict[str, Any] = options
        with pytest.raises(trocar.errors.InvalidArgumentError, match=problem):
            client.generate("llama", TEXTS[0], max_new_tokens=COUNT, **given)


def test_stored_edits_have_positions_too_and_channels(client: trocar.Client) -> None:
    chosen = trocar.positions(prompt=[-1], generated=slice(0, 3))
    edit = trocar.edit("model.layers.0", "add", VECTOR.numpy()[:2], positions=chosen, channels=[3, 5])
    client.store_edits("llama", "late", [edit])
    options: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": [], "taps": ["model.layers.0"]}
    own, stored = (client.generate("llama", TEXTS[0], edits=[each], **options) for each in (edit, "late"))
    plain = client.extract("llama", own.as_inputs(), ["model.layers.0"])["model.layers.0"][0]
    assert own.token_ids == stored.token_ids
    np.testing.assert_array_equal(own["model.layers.0"], stored["model.layers.0"])
    (count,) = stored.edit_counts
    assert (count.prompt, count.generated) == (1, 3)
    changed = np.argwhere(~np.isclose(own["model.layers.0"], plain[:-1], atol=1e-4))
    last = len(own.prompt_ids) - 1
    assert {tuple(each) for each in changed} == {(last + row, at) for row in range(4) for at in (3, 5)}
    with pytest.raises(trocar.errors.InvalidArgumentError, match="ask `generate`"):
        client.extract("llama", TEXTS[0], ["model.layers.0"], edits=["late"])


def test_spans_roles_and_ids_are_positions_of_the_prompt(client: trocar.Client) -> None:
    text, path = "The river ran past the mill", "model.layers.1"
    options: dict[str, Any] = {"max_new_tokens": 5, "stop_token_ids": []}
    whole = client.generate("llama", text, taps=[path], **options)
    first = whole.prompt_ids[0]
    rest = trocar.positions(prompt="all", but_not=trocar.positions(spans="river"))
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"spans": "mill"}, trocar.positions(spans="mill")),
        ({"token_ids": first}, trocar.positions(token_ids=first)),
        ({"spans": "mill", "generated": slice(1, 3)}, trocar.positions(spans="mill")),
        ({"prompt": "all", "but_not": trocar.positions(spans="river", generated=[0])}, rest),
    ]
    for clauses, known in cases:
        chosen = trocar.positions(**clauses)
        run = client.generate("llama", text, taps=[trocar.tap(path, positions=chosen)], **options)
        maps = client.extract("llama", text, [trocar.tap(path, positions=known)])
        wanted = list(maps.info[path].token_positions[0])
        wanted += [len(whole.prompt_ids) + place for place in (1, 2)] if "generated" in clauses else []
        assert list(run.positions(path)) == wanted
        np.testing.assert_array_equal(run[path], whole[path][wanted])
        edit = trocar.edit(path, "add", VECTOR.numpy(), positions=chosen)
        (count,) = client.generate("llama", text, edits=[edit], **options).edit_counts
        assert count.prompt + count.generated == len(wanted)
    ids = trocar.positions(token_ids=first)
    by_ids = client.generate(
        "llama", [list(whole.prompt_ids)], taps=[trocar.tap(path, positions=ids)], **options
    )
    assert by_ids.positions(path)[0] == 0
    chat = trocar.chat([("user", "hello"), ("assistant", "mill")])
    said = trocar.tap(path, positions=trocar.positions(roles="assistant"))
    run = client.generate("llama", chat, taps=[said], **options)
    (places,) = (
        client.extract("llama", chat, [trocar.tap(path, tokens="assistant")]).info[path].token_positions
    )
    assert list(run.positions(path)) == list(places)


def test_each_prompt_has_its_own_spans(client: trocar.Client) -> None:
    path = "model.layers.1"
    tap = trocar.tap(path, positions=trocar.positions(spans="mill"))
    texts = ["The river ran past the mill", "mill"]
    together = client.generate("llama", texts, max_new_tokens=2, stop_token_ids=[], taps=[tap])
    for text, sequence in zip(texts, together.sequences, strict=True):
        alone = client.generate("llama", text, max_new_tokens=2, stop_token_ids=[], taps=[tap])
        assert sequence.positions(path) == alone.positions(path)
        np.testing.assert_array_equal(sequence[path], alone[path])
    with pytest.raises(trocar.errors.InvalidArgumentError, match=r"prompt 1: .*the text is not in it"):
        client.generate("llama", [texts[0], "river"], max_new_tokens=2, taps=[tap])


@pytest.mark.parametrize(
    "chosen", [{}, {"prompt": []}, {"generated": [-1]}, {"generated": slice(-2, None)}, {"prompt": "some"}]
)
def test_positions_that_mean_nothing_are_refused_at_once(chosen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nothing|counts from 0|not one of"):
        trocar.positions(**chosen)
