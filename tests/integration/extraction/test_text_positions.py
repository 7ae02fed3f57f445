"""Positions of texts: they count in each text, never in its padding."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.building import build_here_from_the_start
from tests.support.servers.running_server import RunningServer, running_server

LAYER, BEHIND = "model.layers.0", "model.layers.1"
PROMPTS = [TEXTS[0], "a", "The mill"]
SIDES = ("left", "right")
VALUE = np.zeros((1, 4, 16), np.float32)
VECTOR = np.linspace(-2, 2, 16, dtype=np.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model by the side on which its tokenizer pads."""
    root = tmp_path_factory.mktemp("positions")
    for side in SIDES:
        save_causal("llama", root / side)
        tokenizer = AutoTokenizer.from_pretrained(str(root / side), padding_side=side)
        tokenizer.save_pretrained(str(root / side))
    return {side: root / side for side in SIDES}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    tables = {side: {"source": f"hf:{folder}"} for side, folder in folders.items()}
    limits = {"feature_cache_bytes": 1 << 22}
    with running_server(models=tables, device="cpu", limits=limits) as running:
        yield running


def lengths_of(folders: dict[str, Path], texts: list[str]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(str(folders["left"]))
    return [len(tokenizer(text)["input_ids"]) for text in texts]


def own(value: Any, side: str, lengths: list[int]) -> list[Any]:
    """Return the rows of each text of a padded value, without its padding."""
    longest = max(lengths)
    firsts = [longest - length if side == "left" else 0 for length in lengths]
    pairs = zip(value, firsts, lengths, strict=True)
    return [sample[first : first + length] for sample, first, length in pairs]


def drawn(random: Random, shortest: int) -> Any:
    """Draw a prompt clause that selects something of each text."""
    kind = random.choice(["all", "one", "some", "slice"])
    if kind == "all":
        return "all"
    if kind == "one":
        return random.randrange(-shortest, shortest)
    if kind == "some":
        return [random.randrange(-shortest, shortest) for _ in range(3)]
    return slice(random.choice([None, -1, 0, -3]), None, random.choice([1, 2]))


def places(clause: Any, count: int) -> list[int]:
    """Return the positions of a clause, with Python's own meaning."""
    whole = list(range(count))
    if isinstance(clause, slice):
        return whole[clause]
    if clause == "all":
        return whole
    return sorted({whole[place] for place in ([clause] if isinstance(clause, int) else clause)})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(8))
def test_rows_at_positions_are_those_of_the_whole_value(
    client: trocar.Client, folders: dict[str, Path], side: str, seed: int
) -> None:
    lengths = lengths_of(folders, PROMPTS)
    clause = drawn(Random(seed), min(lengths))
    tap = trocar.tap(LAYER, alias="chosen", positions=trocar.positions(prompt=clause))
    maps = client.extract(side, PROMPTS, [LAYER, tap])
    wanted = [places(clause, length) for length in lengths]
    assert [list(row) for row in maps.info["chosen"].token_positions] == wanted
    for rows, value, chosen in zip(wanted, own(maps[LAYER], side, lengths), maps["chosen"], strict=True):
        np.testing.assert_array_equal(chosen[: len(rows)], value[rows])
        assert not chosen[len(rows) :].any()


@pytest.mark.parametrize("side", SIDES)
def test_token_ids_and_arrays_with_a_mask_are_texts(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folders[side]))
    given = tokenizer(PROMPTS, padding=True, return_tensors="np")
    arrays = {name: given[name] for name in ("input_ids", "attention_mask")}
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    lengths = [len(each) for each in ids]
    tap = trocar.tap(LAYER, alias="last", positions=trocar.positions(prompt=[-1]))
    for inputs in (PROMPTS, ids, arrays):
        maps = client.extract(side, inputs, [LAYER, tap])
        expected = np.stack([each[-1:] for each in own(maps[LAYER], side, lengths)])
        np.testing.assert_array_equal(maps["last"], expected)
    alone = client.extract(side, {"input_ids": given["input_ids"][:1]}, [LAYER, tap])
    np.testing.assert_array_equal(alone["last"], alone[LAYER][:, -1:])
    chat = trocar.chat([("user", "hello")])
    maps = client.extract(side, chat, [LAYER, tap])
    np.testing.assert_array_equal(maps["last"], maps[LAYER][:, -1:])


def tokens_of(folders: dict[str, Path], text: str, start: int, stop: int) -> set[int]:
    """Return the tokens of a text whose offsets overlap a range."""
    tokenizer = AutoTokenizer.from_pretrained(str(folders["left"]))
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return {place for place, (begin, end) in enumerate(offsets) if begin < stop and start < end}


@pytest.mark.parametrize("side", SIDES)
def test_spans_and_ids_are_added_up_and_others_left_out(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    texts = ["The river ran past the mill", "the mill"]
    ids = [AutoTokenizer.from_pretrained(str(folders[side]))(text)["input_ids"] for text in texts]
    mill = [tokens_of(folders, text, text.index("mill"), len(text)) for text in texts]
    begin = [tokens_of(folders, text, 0, 3) for text in texts]
    space = [{place for place, own in enumerate(row) if own == ids[0][-1]} for row in ids]
    no_end = trocar.positions(prompt=[-1], spans="river")
    cases: list[tuple[dict[str, Any], list[set[int]]]] = [
        ({"spans": "mill"}, mill),
        ({"spans": ["mill", (0, 3)]}, [one | other for one, other in zip(mill, begin, strict=True)]),
        ({"spans": (0, 3), "prompt": [-1]}, [b | {len(row) - 1} for b, row in zip(begin, ids, strict=True)]),
        ({"token_ids": ids[0][-1]}, space),
        (
            {"token_ids": [ids[0][-1], ids[0][-1]], "spans": trocar.span(0, 3)},
            [b | c for b, c in zip(begin, space, strict=True)],
        ),
        (
            {"prompt": "all", "but_not": no_end},
            [
                set(range(len(row) - 1)) - (tokens_of(folders, text, 4, 9) if "river" in text else set())
                for text, row in zip(texts, ids, strict=True)
            ],
        ),
    ]
    taps = [
        trocar.tap(LAYER, alias=f"case {number}", positions=trocar.positions(**clauses))
        for number, (clauses, _) in enumerate(cases)
    ]
    maps = client.extract(side, texts, [LAYER, *taps])
    for number, (_, wanted) in enumerate(cases):
        name = f"case {number}"
        assert [set(row) for row in maps.info[name].token_positions] == wanted
        lengths = [len(row) for row in ids]
        for rows, value, chosen in zip(wanted, own(maps[LAYER], side, lengths), maps[name], strict=True):
            np.testing.assert_array_equal(chosen[: len(rows)], value[sorted(rows)])


def test_roles_of_a_chat_are_positions(client: trocar.Client) -> None:
    chat = trocar.chat([("user", "the mill"), ("assistant", "ran"), ("user", "slowly")])
    taps = [
        trocar.tap(LAYER, alias="span", tokens="user"),
        trocar.tap(LAYER, alias="role", positions=trocar.positions(roles="user")),
        trocar.tap(LAYER, alias="both", positions=trocar.positions(roles=["user", "assistant"])),
        trocar.tap(LAYER, alias="assistant", tokens="assistant"),
        trocar.tap(
            LAYER,
            alias="others",
            positions=trocar.positions(prompt="all", but_not=trocar.positions(roles=["user", "assistant"])),
        ),
    ]
    maps = client.extract("left", chat, taps)
    places = {tap.alias: set(maps.info[str(tap.alias)].token_positions[0]) for tap in taps}
    assert places["span"] == places["role"]
    assert places["both"] == places["role"] | places["assistant"]
    assert places["others"] == set(range(maps.tokens.lengths[0])) - places["both"]
    np.testing.assert_array_equal(maps["span"], maps["role"])


def test_token_ids_of_arrays_are_positions(client: trocar.Client, folders: dict[str, Path]) -> None:
    texts = ["The mill!", "!", "!a!"]
    given = AutoTokenizer.from_pretrained(str(folders["left"]))(texts, padding=True, return_tensors="np")
    arrays = {name: given[name] for name in ("input_ids", "attention_mask")}
    wanted = int(given["input_ids"][1, -1])
    chosen = trocar.tap(LAYER, alias="chosen", positions=trocar.positions(token_ids=wanted))
    maps = client.extract("left", arrays, [LAYER, chosen])
    for index, row in enumerate(given["input_ids"]):
        places = np.flatnonzero(row == wanted)
        first = int(np.argmax(given["attention_mask"][index]))
        assert [first + place for place in maps.info["chosen"].token_positions[index]] == places.tolist()
        np.testing.assert_array_equal(maps["chosen"][index, : len(places)], maps[LAYER][index, places])


@pytest.mark.parametrize("side", SIDES)
def test_statistics_pools_samples_and_channels_are_of_the_chosen_rows(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    chosen = trocar.positions(prompt=slice(-3, None))
    taps: list[str | trocar.Tap] = [
        LAYER,
        trocar.tap(LAYER, alias="stats", positions=chosen, stats=["mean", "count"], values=False),
        trocar.tap(LAYER, alias="pool", positions=chosen, reduce=trocar.pool("avg")),
        trocar.tap(LAYER, alias="part", positions=chosen, samples=[2, 0], channels=[1, 3]),
    ]
    maps = client.extract(side, PROMPTS, taps)
    rows = [each[-3:] for each in own(maps[LAYER], side, lengths_of(folders, PROMPTS))]
    together = np.concatenate(rows)
    assert maps.stats["stats"].count == together.size
    np.testing.assert_allclose(maps.stats["stats"].mean, together.mean(dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(maps["pool"], np.stack([each.mean(0) for each in rows]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(maps["part"][0, : len(rows[2])], rows[2][:, [1, 3]])
    np.testing.assert_array_equal(maps["part"][1], rows[0][:, [1, 3]])


@pytest.mark.parametrize("side", SIDES)
def test_edits_change_the_chosen_rows_alone(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    lengths = lengths_of(folders, PROMPTS)
    last = trocar.positions(prompt=[-1])
    plain = client.extract(side, PROMPTS, [LAYER])[LAYER]
    for edit, channels in (
        (trocar.edit(LAYER, "add", VECTOR, positions=last), slice(None)),
        (trocar.edit(LAYER, "add", VECTOR[2:4], positions=last, channels=[2, 3]), slice(2, 4)),
    ):
        changed = client.extract(side, PROMPTS, [LAYER, BEHIND], edits=[edit])
        for before, after in zip(own(plain, side, lengths), own(changed[LAYER], side, lengths), strict=True):
            expected = before.copy()
            expected[-1, channels] += VECTOR[channels]
            np.testing.assert_array_equal(after, expected)
        client.store_edits(side, "steer", [edit], replace=True)
        stored = client.extract(side, PROMPTS, [BEHIND], edits=["steer"])
        np.testing.assert_array_equal(stored[BEHIND], changed[BEHIND])


@pytest.mark.parametrize("side", SIDES)
def test_gradients_at_positions_are_rows_of_the_whole_gradient(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    lengths, last = lengths_of(folders, PROMPTS), trocar.positions(prompt=[0, -1])
    name = f"{LAYER}/grad_out"
    at = trocar.tap(LAYER, positions=last)
    options: dict[str, Any] = {"of": trocar.value(BEHIND, function="square")}
    whole = client.gradients(side, PROMPTS, at=[LAYER], **options)[name]
    chosen = client.gradients(side, PROMPTS, at=[at], **options)[name]
    zero = trocar.edit(name, "zero", positions=last)
    edited = client.gradients(side, PROMPTS, at=[LAYER], edits=[zero], **options)[name]
    for index, before in enumerate(own(whole, side, lengths)):
        rows = sorted({0, len(before) - 1})
        np.testing.assert_array_equal(chosen[index, : len(rows)], before[rows])
        expected = before.copy()
        expected[rows] = 0
        np.testing.assert_array_equal(own(edited, side, lengths)[index], expected)


def test_every_other_way_to_ask_gives_the_same(
    client: trocar.Client, server: RunningServer, folders: dict[str, Path]
) -> None:
    tap = trocar.tap(LAYER, positions=trocar.positions(prompt=[-2, -1]))
    texts = [TEXTS[0], "The mill"]
    expected = client.extract("left", texts, [tap])[LAYER]
    assert client.plan("left", texts, [tap]).feature_maps[LAYER].shape == expected.shape
    with client.extract_stream("left", [texts, ["a"], texts], [tap]) as stream:
        first, second, third = (result.maps for result in stream)
    assert second is None  # it has one token
    for maps in (first, third):
        assert maps is not None
        np.testing.assert_array_equal(maps[LAYER], expected)
    given = AutoTokenizer.from_pretrained(str(folders["left"]))(texts, padding=True, return_tensors="np")
    arrays = {name: given[name] for name in ("input_ids", "attention_mask")}
    with client.prepare("left", arrays, [tap]) as prepared:
        shifted = {name: value[::-1].copy() for name, value in arrays.items()}
        after = [prepared(each)[LAYER] for each in (arrays, shifted)]
    np.testing.assert_array_equal(after[0], client.extract("left", arrays, [tap])[LAYER])
    np.testing.assert_array_equal(after[1], client.extract("left", shifted, [tap])[LAYER])
    source = {"left": f"hf:{folders['left']}"}
    with trocar.connect("local", models=source, settings={"device": "cpu"}) as local:
        np.testing.assert_array_equal(local.extract("left", texts, [tap])[LAYER], expected)


def test_a_trainer_and_a_compiled_pass_have_positions(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_here_from_the_start(monkeypatch)
    tap = trocar.tap(LAYER, positions=trocar.positions(prompt=[0, -1]))
    tables = {"left": {"source": f"hf:{folders['left']}"}}
    engine = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0}
    with (
        running_server(models=tables, device="cpu", engine=engine, data_dir=tmp_path) as server,
        trocar.connect(server.address) as client,
    ):
        expected = client.extract("left", PROMPTS, [tap])
        for _ in range(6):
            client.extract("left", PROMPTS, [tap], options=trocar.options(numerics="fast"))
            server.run(server.engine.compiled.settled)
        fast = client.extract("left", PROMPTS, [tap], options=trocar.options(numerics="fast"))
        assert fast.info[LAYER].token_positions == expected.info[LAYER].token_positions
        np.testing.assert_allclose(fast[LAYER], expected[LAYER], rtol=1e-4, atol=1e-5)
        others = client.extract("left", PROMPTS[::-1], [tap], options=trocar.options(numerics="fast"))
        np.testing.assert_allclose(others[LAYER], expected[LAYER][::-1], rtol=1e-4, atol=1e-5)
        with client.train("left", losses="causal_lm") as trainer:
            own = trainer.extract(PROMPTS, [tap])
        np.testing.assert_array_equal(own[LAYER], expected[LAYER])


def test_a_kept_reply_is_that_of_its_positions(server: RunningServer, folders: dict[str, Path]) -> None:
    given = AutoTokenizer.from_pretrained(str(folders["right"]))(PROMPTS, padding=True, return_tensors="np")
    arrays = {name: given[name] for name in ("input_ids", "attention_mask")}
    is_first = np.arange(given["input_ids"].shape[1]) < 1
    shorter = {**arrays, "attention_mask": arrays["attention_mask"] * is_first}
    with trocar.connect(server.address, options=trocar.options(cache=True)) as client:
        for _ in range(2):
            whole = client.extract("right", arrays, [LAYER])[LAYER]
            for place in (0, -1):
                tap = trocar.tap(LAYER, alias="row", positions=trocar.positions(prompt=[place]))
                found = client.extract("right", arrays, [tap])["row"]
                rows = own(whole, "right", lengths_of(folders, PROMPTS))
                np.testing.assert_array_equal(found[:, 0], np.stack([each[place] for each in rows]))
                first = client.extract("right", shorter, [LAYER, tap])
                np.testing.assert_array_equal(first["row"][:, 0], first[LAYER][:, 0])


@pytest.mark.parametrize(
    ("positions", "inputs", "problem"),
    [
        ({"prompt": [3]}, PROMPTS, "text 1: position 3 of prompt= is outside of its 1 tokens"),
        ({"prompt": slice(2, None)}, PROMPTS, "text 1: prompt= selects none of its 1 tokens"),
        ({"prompt": [-4]}, {"input_ids": np.ones((1, 3), np.int64)}, "text 0: position -4"),
        ({"generated": [0]}, PROMPTS, "ask `generate`"),
        ({"prompt": [0], "generated": "all"}, PROMPTS, "ask `generate`"),
        ({"prompt": "all", "but_not": trocar.positions(generated="all")}, PROMPTS, "ask `generate`"),
        ({"spans": "river"}, PROMPTS, "the text 'river' of text 1: the text is not in it"),
        ({"spans": (0, 9)}, [[5, 6]], "of text 0: it was sent as token ids"),
        (
            {"spans": (0, 9)},
            {"input_ids": np.ones((1, 3), np.int64)},
            "text 0: characters 0 to 9: it was sent",
        ),
        ({"token_ids": 2}, PROMPTS, "text 0: none of its tokens has the id 2"),
        ({"roles": "user"}, PROMPTS, "it is not a chat"),
        (
            {"prompt": [0], "but_not": trocar.positions(prompt="all")},
            PROMPTS,
            "text 0: but_not= leaves no token",
        ),
    ],
)
def test_positions_that_are_not_there_are_refused_with_the_text(
    client: trocar.Client, positions: dict[str, Any], inputs: Any, problem: str
) -> None:
    chosen = trocar.positions(**positions)
    edit = trocar.edit(LAYER, "zero", positions=chosen)
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.InvalidArgumentError, match=rf"taps\[0\].*{problem}"):
            call("right", inputs, [trocar.tap(LAYER, positions=chosen)])
        with pytest.raises(trocar.errors.InvalidArgumentError, match=rf"edits\[0\].*{problem}"):
            call("right", inputs, [LAYER], edits=[edit])


def test_other_values_and_inputs_have_no_positions(client: trocar.Client) -> None:
    last = trocar.positions(prompt=[-1])
    with pytest.raises(trocar.errors.ReductionRejectedError, match="tokens are dimension 1"):
        client.extract("right", PROMPTS, [trocar.tap(f"{LAYER}.self_attn/pattern", positions=last)])
    with pytest.raises(trocar.errors.ReductionRejectedError, match="neither texts nor their token ids"):
        client.extract("right", VALUE, [trocar.tap(BEHIND, positions=last)], start_at=f"{BEHIND}/in")
    with pytest.raises(ValueError, match="not both"):
        trocar.tap(LAYER, positions=last, tokens=[0])
    with pytest.raises(ValueError, match="leave tokens="):
        trocar.edit(LAYER, "zero", positions=last, tokens=[0])
