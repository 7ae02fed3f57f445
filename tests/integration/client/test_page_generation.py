"""The page's Generate panel in a real browser, against `client.generate`."""

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
from safetensors.numpy import load_file

import trocar
from tests.support.models.causal_models import save_causal
from tests.support.models.text_models import save_text_model
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from trocar._page.frames import CONTENT_TYPE, message_frame, trailers_frame
from trocar_api.v1 import generation_pb2 as pb
from trocar_api.v1.extraction_pb2 import TokenIds
from trocar_server.engine.generate.text_pieces import TextPieces

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FAMILIES = ("llama", "gpt2", "bloom")
BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "bloom": "transformer.h.1"}
PROMPT, COUNT = "The river ran past the mill", 12
GENERATE = "**/*/Generate"
SHOWN = {
    "panel": "generate",
    "model": "llama",
    "text": PROMPT,
    "module": BLOCKS["llama"],
    "generate.max_new_tokens": str(COUNT),
    "generate.ends": "ignored",
}
OPTIONS: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": [], "logprobs": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("causal")
    for family in FAMILIES:
        save_causal(family, folder / family)
    save_text_model(folder / "bert")
    tables: dict[str, Any] = {name: {"source": f"hf:{folder / name}"} for name in (*FAMILIES, "bert")}
    with running_server(models=tables, device="cpu") as running:
        yield running


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: RunningServer) -> Path:
    """A folder in which copied code reaches the server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    return tmp_path


def open_panel(tab: Tab, url: str, **differing: str) -> None:
    tab.page.goto(f"{url}#{urlencode({**SHOWN, **differing})}")
    tab.page.get_by_role("button", name="Run", exact=True).wait_for()
    tab.page.locator(".status progress").wait_for(state="detached")


def run(tab: Tab, side: str = "before", end: str = "end: the most tokens") -> None:
    """Run, and wait for the end of one side."""
    tab.page.get_by_role("button", name="Run", exact=True).click()
    tab.page.locator(f"section[data-side={side}] .end", has_text=end).wait_for()
    tab.page.locator(".status progress").wait_for(state="detached")


def pieces(tab: Tab, side: str = "before") -> Any:
    return tab.page.locator(f"section[data-side={side}] .piece")


FACTS = re.compile(r"position (\d+), id (\d+)(?:, logprob (-?[\d.,e-]+))?")


def facts_of(tab: Tab, nth: int, side: str = "before") -> tuple[int, int, float | None]:
    """Position, id and logprob of a token, as the page shows them when it is clicked."""
    pieces(tab, side).nth(nth).click()
    shown = FACTS.search(tab.page.locator("section.details h3").inner_text())
    assert shown is not None
    position, token_id, logprob = shown.groups()
    return int(position), int(token_id), None if logprob is None else float(logprob.replace(",", ""))


def shown_ids(tab: Tab, side: str = "before") -> list[int]:
    return [facts_of(tab, nth, side)[1] for nth in range(pieces(tab, side).count())]


def execute(tab: Tab, folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run what the page copies, program and commands; return the run of the program."""
    variables = tab.copied_python()
    capsys.readouterr()
    for command in "\n".join(tab.copied_commands()).split("\ntrocar "):  # texts have ends of lines, too
        words = shlex.split(command.removeprefix("trocar "))
        done = warm_python.run(
            [sys.executable, "-m", "trocar", *words],
            cwd=folder,
            env={**os.environ, "TROCAR_SERVER": server.address},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
    return variables["run"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_logprobs_and_values_are_those_of_the_client(
    tab: Tab,
    url: str,
    client: trocar.Client,
    in_folder: Path,
    server: RunningServer,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    block = BLOCKS[family]
    open_panel(tab, url, model=family, module=block, **{"generate.read": "lens"})
    run(tab)
    shown = tab.copied_python()["run"]
    (name,) = [each for each in shown.values if ":lens" not in each]
    taps = [name, trocar.lens(name)]
    expected = client.generate(family, trocar.texts(PROMPT), taps=taps, **OPTIONS).finish()
    whole = [*expected.prompt_ids, *expected.token_ids]
    seen = [facts_of(tab, nth) for nth in range(len(whole))]
    assert [(position, token_id) for position, token_id, _ in seen] == list(enumerate(whole))
    logprobs = [logprob for _, _, logprob in seen[-COUNT:] if logprob is not None]
    np.testing.assert_allclose(logprobs, list(expected.logprobs), rtol=1e-5)
    assert {one[2] for one in seen[:-COUNT]} == {None}
    np.testing.assert_array_equal(tab.saved(f"Save {name} as .npy"), expected[name])
    last = facts_of(tab, len(whole) - 2)[0]
    rows = tab.page.get_by_role("table", name=f"After it {name} would say").locator("tbody td")
    shares = [float(text.removesuffix(" %")) for text in rows.all_inner_texts()]
    read = [100 * np.exp(token.logprob) for token in expected.lens(name)[last]]
    np.testing.assert_allclose(shares, read, rtol=5e-3)
    copied = execute(tab, in_folder, server, capsys)
    assert copied.token_ids == expected.token_ids
    written = load_file(in_folder / "run.safetensors")
    assert written["token_ids"].tolist() == whole
    np.testing.assert_array_equal(written[name], expected[name])


def test_drawn_tokens_and_stop_texts(
    tab: Tab,
    url: str,
    client: trocar.Client,
    in_folder: Path,
    server: RunningServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 7, **OPTIONS}
    text = client.generate("llama", PROMPT, **drawn).text
    stops = [text[4:6], "\n\n"]
    expected = client.generate("llama", PROMPT, stop=stops, **drawn).finish()
    assert expected.finish_reason == "stop_string"
    open_panel(tab, url)
    tab.page.get_by_label("Temperature").fill("1.5")
    tab.page.get_by_label("Seed").fill("7")
    written = "\n".join(each.replace("\\", "\\\\").replace("\n", "\\n") for each in stops)
    tab.page.get_by_label("Stop at").fill(written)
    run(tab, end="end: a text to stop at")
    assert tuple(shown_ids(tab)[-len(expected.token_ids) :]) == expected.token_ids
    assert execute(tab, in_folder, server, capsys).token_ids == expected.token_ids
    saved = load_file(in_folder / "run.safetensors")["token_ids"].tolist()
    assert tuple(saved[-len(expected.token_ids) :]) == expected.token_ids


def test_an_edit_at_clicked_tokens_before_and_after(
    tab: Tab,
    url: str,
    client: trocar.Client,
    in_folder: Path,
    server: RunningServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_panel(tab, url)
    run(tab)
    prompt_count = len(client.generate("llama", PROMPT, **OPTIONS).prompt_ids)
    pieces(tab).nth(prompt_count + 2).click()
    tab.page.get_by_role("button", name="Edit model.layers.1 at this token").click()
    tab.page.get_by_label("Operation").select_option("add")  # a new operation, so without positions
    pieces(tab).nth(prompt_count + 2).click()
    tab.page.get_by_role("button", name="Edit 1 acts here").click()
    tab.page.get_by_role("group", name="Only these of the prompt").get_by_role("button").last.click()
    tab.page.get_by_label("value", exact=True).fill("9")
    tab.page.keyboard.press("Enter")
    (edit,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["generate.edits"][0])
    assert edit["positions"] == {"prompt": [prompt_count - 1], "generated": [2]}
    outdated = tab.page.get_by_text("This run is of other choices")
    outdated.wait_for()
    run(tab, "after")
    assert outdated.count() == 0
    own = trocar.edit(
        "model.layers.1",
        "add",
        9.0,
        positions=trocar.positions(prompt=[prompt_count - 1], generated=[2]),
    )
    expected = client.generate("llama", PROMPT, edits=[own], **OPTIONS).finish()
    assert tuple(shown_ids(tab, "after")[prompt_count:]) == expected.token_ids
    assert tuple(shown_ids(tab, "before")[prompt_count:]) == expected.baseline.token_ids
    differing = next(at for at, (a, b) in enumerate(pairs(expected)) if a != b)
    tab.page.get_by_text(f"The first token that differs is generated token {differing}").wait_for()
    marked = tab.page.locator(".piece.differs")
    assert marked.evaluate_all("all => all.map(one => Number(one.dataset.position))") == [
        prompt_count + differing
    ] * len(marked.all())
    assert marked.count() == 2
    counts = tab.page.get_by_role("table", name="Positions at which edits were applied")
    assert counts.locator("tbody td").all_inner_texts() == ["1", "1"]
    copied = execute(tab, in_folder, server, capsys)
    assert (copied.token_ids, copied.baseline.token_ids) == (expected.token_ids, expected.baseline.token_ids)
    for file, one in (("after", expected), ("before", expected.baseline)):
        ids = load_file(in_folder / f"{file}.safetensors")["token_ids"].tolist()
        assert tuple(ids[prompt_count:]) == one.token_ids


def pairs(expected: Any) -> Any:
    return zip(expected.baseline.token_ids, expected.token_ids, strict=True)


def test_positions_are_all_some_or_a_range(tab: Tab, url: str) -> None:
    open_panel(tab, url)
    tab.page.get_by_role("button", name="Add an edit of").click()

    def positions() -> Any:
        (edit,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["generate.edits"][0])
        return edit.get("positions")

    assert positions() is None
    everywhere = tab.page.get_by_role("button", name="All of generated tokens")
    assert everywhere.get_attribute("aria-pressed") == "true"
    everywhere.click()
    assert positions() == {"generated": "all"}
    tab.page.get_by_label("Positions of the prompt").fill("0, 2:4")
    tab.page.keyboard.press("Enter")
    assert positions() == {"generated": "all", "prompt": [0, 2, 3]}
    tab.page.get_by_label("Positions of generated tokens").fill("0 : 8")
    tab.page.keyboard.press("Enter")
    assert positions() == {"generated": "0:8", "prompt": [0, 2, 3]}
    tab.page.get_by_role("button", name="All of the prompt").click()
    assert positions() == {"generated": "0:8", "prompt": "all"}
    everywhere.click()
    assert positions() is None
    run(tab, "after")
    tab.page.get_by_role("table", name="Positions at which edits were applied").wait_for()


def test_stop_ends_the_run_at_both_ends(
    tab: Tab, url: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = TextPieces.add_all, 1

    async def held(self: TextPieces, *given: Any) -> Any:
        nonlocal count
        count -= 1
        if count < 0:
            await asyncio.Event().wait()
        return await real(self, *given)

    monkeypatch.setattr(TextPieces, "add_all", held)
    open_panel(tab, url)
    stop = tab.page.get_by_role("button", name="Stop", exact=True)
    assert stop.is_disabled()
    tab.page.get_by_role("button", name="Run", exact=True).click()
    tab.page.get_by_text(re.compile("^[1-4] tokens$")).wait_for()  # as they come
    assert server.engine.caches.count == 1
    stop.click()
    tab.page.get_by_text(re.compile("^[1-4] tokens; end: stopped$")).wait_for()
    wait_until(lambda: server.engine.caches.count == 0)
    assert tab.page.get_by_role("alert").count() == 0
    monkeypatch.setattr(TextPieces, "add_all", real)
    run(tab)
    assert pieces(tab).count() == COUNT + len(shown_ids(tab)) - COUNT


def test_a_run_that_the_server_ends_keeps_its_tokens_and_says_why(tab: Tab, url: str) -> None:
    token = pb.GeneratedToken(position=1, token_id=5, text="mill", logprob=-0.5)
    messages = [pb.GenerateResponse(started=pb.GenerationStarted(prompts=[TokenIds(ids=[7])]))]
    messages.append(pb.GenerateResponse(tokens=[token]))
    body = b"".join(message_frame(one.SerializeToString()) for one in messages)
    ended = body + trailers_frame(4, "the reader was too slow")
    tab.page.route(
        GENERATE,
        lambda route: route.fulfill(status=200, headers={"content-type": CONTENT_TYPE}, body=ended),
    )
    open_panel(tab, url)
    run(tab, end="1 tokens; end: DEADLINE_EXCEEDED")
    tab.page.get_by_role("alert").get_by_text("the reader was too slow").wait_for()
    assert pieces(tab).all_inner_texts() == ["#7", "mill"]


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ({"text": ""}, "Type a prompt"),
        ({"generate.max_new_tokens": "5000"}, "positions"),
        ({"generate.max_new_tokens": "many"}, "Most new tokens is many: write a whole number from 1"),
        ({"generate.temperature": "-1"}, "Temperature is -1"),
        ({"module": "model.layers.0.mlp.gate_proj", "generate.read": "lens"}, "width"),
    ],
)
def test_what_is_refused_is_said_in_the_panel(
    tab: Tab, url: str, shown: dict[str, str], problem: str
) -> None:
    open_panel(tab, url, **shown)
    tab.page.get_by_role("button", name="Run", exact=True).click()
    tab.page.get_by_role("alert").get_by_text(problem).wait_for()
    assert tab.page.get_by_role("button", name="Run", exact=True).is_enabled()


def test_models_that_generate_no_text_have_no_panel(tab: Tab, url: str, client: trocar.Client) -> None:
    assert {one.model_id: one.generates for one in client.models()} == {
        **dict.fromkeys(FAMILIES, True),
        "bert": False,
    }
    open_panel(tab, url)
    tab.page.locator("header select").select_option("bert")
    tab.page.get_by_role("tab", name="Generate").wait_for(state="detached")
    assert tab.page.get_by_role("tab", name="Look").get_attribute("aria-selected") == "true"


HOSTILE = [
    {"at": BLOCKS["llama"], "op": "add", "value": 3, "positions": {"prompt": "all", "generated": "0:2"}},
    {"at": BLOCKS["llama"], "op": "add", "value": 3, "positions": {"prompt": "__proto__"}},
    {"at": BLOCKS["llama"], "op": "add", "value": 3, "positions": {"spans": [1]}},
    {"at": BLOCKS["llama"], "op": "add", "value": 3, "positions": None},
    {"at": BLOCKS["llama"], "op": "add", "value": 3, "tokens": "abc"},
    {"at": BLOCKS["llama"], "op": "scale", "factor": 2, "channels": {"a": 1}},
    {"at": BLOCKS["llama"], "op": "steer", "direction": "A b"},
    {"at": BLOCKS["llama"], "op": "steer", "direction": [1.0], "units": "norm"},
    {"at": BLOCKS["llama"], "op": "steer", "direction": "abc", "units": "miles"},
    {"at": BLOCKS["llama"], "op": "project_onto", "basis": "abc"},
    {"at": BLOCKS["llama"], "op": "constructor"},
    {"at": BLOCKS["llama"], "op": "scale", "factor": 2, "constructor": 1},
    {"at": 7, "op": "scale"},
    None,
    [],
]


def test_a_link_brings_all_back_and_runs_nothing_by_itself(tab: Tab, url: str, client: trocar.Client) -> None:
    runs: list[str] = []
    tab.page.on("request", lambda one: runs.append(one.url) if one.url.endswith("/Generate") else None)
    shown = {
        "generate.edits": json.dumps(HOSTILE),
        "generate.temperature": "0.5",
        "generate.seed": "3",
        "generate.colour": "constructor",
        "generate.readouts": json.dumps([{"name": "A b", "at": "x"}, {"name": "warm"}, None, 7]),
        "generate.read": "nonsense",
    }
    open_panel(tab, url, **shown)
    assert tab.page.get_by_label("Prompt", exact=True).input_value() == PROMPT
    assert tab.page.get_by_label("Temperature").input_value() == "0.5"
    assert tab.page.locator("ol.edits li").count() == 1  # no direction is read
    assert runs == []
    run(tab, "after")
    assert len(runs) == 2
    chosen = trocar.positions(prompt="all", generated=slice(0, 2))
    own = trocar.edit(BLOCKS["llama"], "add", 3.0, positions=chosen)
    expected = client.generate("llama", PROMPT, edits=[own], temperature=0.5, seed=3, **OPTIONS)
    assert tuple(shown_ids(tab, "after")[-COUNT:]) == expected.token_ids


def test_tokens_are_reached_by_keyboard(tab: Tab, url: str, client: trocar.Client) -> None:
    expected = client.generate("llama", PROMPT, **OPTIONS).finish()
    open_panel(tab, url, text="")
    prompt = tab.page.get_by_label("Prompt", exact=True)
    prompt.fill(PROMPT)
    prompt.press("Control+Enter")
    tab.page.locator(".end", has_text="end:").wait_for()
    assert parse_qs(urlsplit(tab.page.url).fragment)["text"] == [PROMPT]
    first = len(expected.prompt_ids)
    pieces(tab).nth(first).focus()
    tab.page.keyboard.press("ArrowRight")
    details = tab.page.locator("section.details")
    details.get_by_text(f"generated token 1, position {first + 1}, id {expected.token_ids[1]}").wait_for()
    likely = details.get_by_role("table", name="Likely here").locator("tbody th").all_inner_texts()
    assert len(likely) == len(expected.tokens[1].likely)
    tab.page.keyboard.press("End")
    details.get_by_text(f"generated token {COUNT - 1}").wait_for()
    tab.page.keyboard.press("Home")
    details.get_by_text("token 0 of the prompt").wait_for()
    tab.page.keyboard.press("Enter")
    assert pieces(tab).first.get_attribute("aria-pressed") == "true"


def test_colours_are_of_what_is_chosen(tab: Tab, url: str, client: trocar.Client) -> None:
    block = BLOCKS["llama"]
    taps: list[Any] = [block, trocar.lens(block)]
    expected = client.generate("llama", PROMPT, taps=taps, **OPTIONS).finish()
    open_panel(tab, url, **{"generate.read": "lens"})
    run(tab)
    top = np.array([tokens[0].logprob for tokens in expected.lens(block)])
    numbers = {
        "logprob": np.array(expected.logprobs),
        "norm": np.linalg.norm(expected[block], axis=1),
        "mean": expected[block].mean(axis=1),
        "lens": top,
    }
    for name, values in numbers.items():
        tab.page.get_by_label("Colour of tokens").select_option(name)
        colours = pieces(tab).evaluate_all("all => all.map(one => one.style.background)")
        own = colours[-COUNT:] if name == "logprob" else colours[:-1]
        greens = np.array([int(re.findall(r"\d+", colour)[1]) for colour in own])
        assert (np.diff(greens[np.argsort(values)]) >= 0).all(), name  # of viridis: grows with the value
        assert all(not colour for colour in colours if colour not in own)
    below = pieces(tab).locator("small").count()
    assert below == len(top)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_panels_show_values_of_these_models_without_their_logits(
    tab: Tab, url: str, client: trocar.Client, in_folder: Path, family: str
) -> None:
    open_panel(tab, url, model=family, module="")  # a pass without a module
    assert tab.page.get_by_role("alert").count() == 0
    tab.page.goto("about:blank")
    tab.page.goto(f"{url}#{urlencode({'model': family, 'text': PROMPT, 'module': 'lm_head'})}")
    tab.page.get_by_role("button", name="Save as .npy").wait_for()
    shown = tab.saved("Save as .npy")
    maps = tab.copied_python()["maps"]
    np.testing.assert_array_equal(maps["lm_head"], shown)
    assert list(maps) == ["lm_head", "/in"]
    assert maps["/in"].tolist() == [list(client.generate(family, PROMPT, max_new_tokens=1).prompt_ids)]
    tab.open("Change")
    tab.page.get_by_role("button", name="Add an edit of").click()
    tab.page.locator('section.after[aria-busy="false"]').wait_for()
    assert not tab.saved("Save what came out as .npy").any()
    assert not tab.copied_python()["after"]["lm_head"].any()


WARM = ["a kind word", "thank you so much", "what a lovely day"]
COLD = ["go away", "what a dreadful day", "I do not care"]
SHOWN_DIGITS = 1e-5


@pytest.fixture
def directions(client: trocar.Client) -> Iterator[dict[str, str]]:
    """Places of stored directions by name: `warm`, a vector at each block, and `moods`, three at this one."""
    at, data = BLOCKS["llama"], WARM + COLD
    given: dict[str, Any] = {"folds": 0, "positions": trocar.positions(prompt=[-1])}
    warm = ["warm"] * 3 + ["cold"] * 3
    client.fit_direction("llama", data, warm, "layer[*]", name="warm", kind="mean_difference", **given)
    client.fit_direction("llama", data, [0, 1, 2] * 2, at, name="moods", kind="logistic", **given)
    yield {"warm": at, "moods": at}
    for name in ("warm", "moods"):
        client.delete_directions("llama", name)


def open_directions(tab: Tab) -> Any:
    """Unfold the stored directions, choose the place of those that have several, and return their rows."""
    tab.page.locator("summary", has_text="Stored directions").click()
    tab.page.locator(".status progress").wait_for(state="detached")
    tab.page.locator("details[open]").locator("li, p").first.wait_for()
    for places in tab.page.get_by_label("Place of").all():
        places.select_option(BLOCKS["llama"])
    return tab.page.locator("ul.directions li")


def test_steering_with_a_stored_direction(
    tab: Tab,
    url: str,
    client: trocar.Client,
    in_folder: Path,
    server: RunningServer,
    capsys: pytest.CaptureFixture[str],
    directions: dict[str, str],
) -> None:
    open_panel(tab, url, module="", **{"generate.max_new_tokens": str(COUNT)})
    rows = open_directions(tab)
    rows.first.wait_for()
    assert [each.split()[0] for each in rows.all_inner_texts()] == sorted(directions)
    rows.get_by_text("mean difference, from cold to warm").wait_for()
    tab.page.get_by_role("button", name=f"Edit with warm at {directions['warm']}").click()
    tab.page.get_by_label("alpha", exact=True).fill("-1.5")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("button", name="All of generated tokens").click()
    (written,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["generate.edits"][0])
    assert written == {
        "at": directions["warm"],
        "op": "steer",
        "direction": "warm",
        "alpha": -1.5,
        "units": "norm",
        "positions": {"generated": "all"},
    }
    run(tab, "after")
    own = trocar.edit(
        directions["warm"],
        "steer",
        "warm",
        alpha=-1.5,
        units="norm",
        positions=trocar.positions(generated="all"),
    )
    expected = client.generate("llama", PROMPT, edits=[own], **OPTIONS).finish()
    assert expected.token_ids != expected.baseline.token_ids
    assert tuple(shown_ids(tab, "after")[-COUNT:]) == expected.token_ids
    copied = execute(tab, in_folder, server, capsys)
    assert (copied.text, copied.baseline.text) == (expected.text, expected.baseline.text)
    tab.page.reload()  # the link
    run(tab, "after")
    assert tuple(shown_ids(tab, "after")[-COUNT:]) == expected.token_ids


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    ("name", "operation", "limits"),
    [
        ("warm", "cap", {"low": -0.05, "high": 0.05}),
        ("warm", "project_out", {}),
        ("moods", "project_out", {}),
    ],
)
def test_other_edits_with_a_stored_direction(
    tab: Tab,
    url: str,
    client: trocar.Client,
    directions: dict[str, str],
    name: str,
    operation: Any,
    limits: dict[str, float],
) -> None:
    open_panel(tab, url, module="")
    open_directions(tab)
    tab.page.get_by_role("button", name=f"Edit with {name} at").click()
    operations = tab.page.get_by_label("Operation")
    if name == "moods":
        assert operations.input_value() == operation  # several vectors can only be projected out
    operations.select_option(operation)
    for limit, value in limits.items():
        tab.page.get_by_label(limit, exact=True).fill(str(value))
        tab.page.keyboard.press("Enter")
    run(tab, "after")
    given: dict[str, Any] = {**limits, "units": "norm"} if limits else {}
    own = trocar.edit(directions[name], operation, name, **given)
    expected = client.generate("llama", PROMPT, edits=[own], **OPTIONS).finish()
    assert tuple(shown_ids(tab, "after")[-COUNT:]) == expected.token_ids
    assert tab.copied_python()["run"].text == expected.text


@pytest.mark.usefixtures("in_folder")
def test_tokens_have_the_colour_of_what_a_direction_reads(
    tab: Tab, url: str, client: trocar.Client, directions: dict[str, str]
) -> None:
    open_panel(tab, url, module="")
    open_directions(tab)
    for name in ("moods", "warm"):
        tab.page.get_by_role("button", name=f"Read {name} at {directions[name]}").click()
    run(tab)
    values = {name: f"{place}:{name}" for name, place in directions.items()}
    taps = [trocar.readout(name, place) for name, place in directions.items()]
    expected = client.generate("llama", PROMPT, taps=taps, **OPTIONS).finish()
    warm = expected[values["warm"]][:, 0]
    assert tab.page.get_by_label("Colour of tokens").input_value() == values["warm"]
    read = tab.page.locator("dl.statistics div", has_text=values["warm"]).locator("dd")
    shown = []
    for nth in range(len(warm)):
        pieces(tab).nth(nth).click()
        shown.append(float(read.inner_text().removeprefix("reads ").replace(",", "")))
    np.testing.assert_allclose(shown, warm, rtol=SHOWN_DIGITS)
    columns = {values["warm"]: warm}
    columns |= {f"{values['moods']}[{at}]": expected[values["moods"]][:, at] for at in range(3)}
    for colour, numbers in columns.items():
        tab.page.get_by_label("Colour of tokens").select_option(colour)
        colours = pieces(tab).evaluate_all("all => all.map(one => one.style.background)")
        greens = np.array([int(re.findall(r"\d+", each)[1]) for each in colours[:-1]])
        assert (np.diff(greens[np.argsort(numbers)]) >= 0).all(), colour
    for name in directions:
        np.testing.assert_array_equal(tab.saved(f"Save {values[name]} as .npy"), expected[values[name]])
    copied = tab.copied_python()["run"]
    assert copied.text == expected.text
    np.testing.assert_array_equal(copied[values["warm"]], expected[values["warm"]])
    tab.page.reload()  # the link
    run(tab)
    tab.page.get_by_role("button", name=f"Remove moods at {directions['moods']}").click()
    tab.page.get_by_text("This run is of other choices").wait_for()


def test_without_directions_the_list_says_how_to_make_one(tab: Tab, url: str) -> None:
    open_panel(tab, url, model="gpt2", module="")
    open_directions(tab)
    tab.page.get_by_text("There are none for this model").wait_for()
    tab.page.get_by_text("client.fit_direction(").wait_for()
