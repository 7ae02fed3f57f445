"""Every panel of the page is usable by screen reader and keyboard, as far as axe-core can tell."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
from transformers import BertForSequenceClassification

import trocar
from tests.support.models import text_models
from tests.support.models.causal_models import save_causal
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import Serve
from trocar_server.auth import Scope, TokenFile

AXE = Path(__file__).parents[3] / "page" / "node_modules" / "axe-core" / "axe.min.js"
"""Installed by `npm ci` in page/; not part of the page."""
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: `npm ci` in page/"),
]

MODEL, MODULE = "squeezenet1_1", "features.3.squeeze"
EDITS = [
    {"at": f"{MODULE}/grad_out", "op": "clamp", "low": 0},
    {"at": MODULE, "op": "swap", "source": "coffee", "channels": [1]},
    {"at": f"{MODULE}/param(weight)", "op": "scale", "factor": 0},
]
TEXT_MODEL, LAYER = "texts", "bert.encoder.layer.0"
TEXT = {"model": TEXT_MODEL, "text": "the cat sat", "look.against": "", "change.edits": "[]"}
STATES = {
    "a channel": {"channel": "3"},
    "an attention": {
        **TEXT,
        "module": f"{LAYER}.attention.self",
        "port": "pattern",
        "channel": "0",
        "sample": "",
    },
    "tokens": {
        **TEXT,
        "panel": "change",
        "module": LAYER,
        "change.edits": json.dumps([{"at": LAYER, "op": "mean_ablate", "tokens": [1], "reference": [0.0]}]),
    },
    "contributions": {**TEXT, "panel": "attribute"},
    "a failure": {"panel": "attribute", "attribute.target": "unicorn"},
    "gradient health": {"panel": "attribute", "attribute.method": "health"},
}
"""What links of states have that differ from `link`."""
SHOWN = {
    "a channel": ".large canvas",
    "an attention": ".matrix canvas",
    "tokens": "section.after[aria-busy=false]",
    "contributions": ".token-share",
    "a failure": ".problem",
    "gradient health": "figure.health",
}
CAUSAL_MODEL, BLOCK, DIRECTION = "llama", "model.layers.1", "warm"
GENERATED = {
    "panel": "generate",
    "model": CAUSAL_MODEL,
    "module": BLOCK,
    "text": "The river ran",
    "sample": "",
    "generate.read": "lens",
    "generate.colour": "lens",
    "generate.ends": "ignored",
    "generate.edits": json.dumps(
        [
            {"at": BLOCK, "op": "add", "value": 9.0, "positions": {"prompt": "all", "generated": [0, 2]}},
            {"at": BLOCK, "op": "steer", "direction": DIRECTION, "alpha": 0.5, "units": "norm"},
        ]
    ),
    "generate.at": "1",
    "generate.readouts": json.dumps([{"name": DIRECTION, "at": BLOCK}]),
}
"""What a link of a run with edits, one of them along a stored direction that is read, too, has."""
WORDS = ["a kind word", "thank you", "go away", "a dreadful day"]
QUESTIONS = {"train": "Publish", "operate": "Drain"}
"""Buttons that ask once more, by panel."""
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def link(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A link to the page, with an input, a module and a trainer that are chosen, a comparison and edits."""
    folder = tmp_path_factory.mktemp("classifier")
    text_models.save_text_classifier(folder, BertForSequenceClassification)
    causal = tmp_path_factory.mktemp("causal")
    save_causal("llama", causal)
    models = {
        MODEL: {"weights": "random:0", "categories": f"torchvision:{MODEL}"},
        TEXT_MODEL: {"source": f"hf:{folder}"},
        CAUSAL_MODEL: {"source": f"hf:{causal}"},
    }
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as client:
        trainer = client.train(MODEL, head=2, trainable=["classifier"])
        client.fit_direction(
            CAUSAL_MODEL, WORDS, [0, 0, 1, 1], ["layer[*]"], name=DIRECTION, kind="mean_difference", folds=2
        )
        trainer.fit((np.zeros((4, 3, 64, 64), np.float32), np.arange(4) % 2), epochs=1, batch_size=2)
        with client.page() as page:
            shown = {
                "model": MODEL,
                "sample": "cat",
                "module": MODULE,
                "train.trainer": trainer.trainer_id,
                "look.against": "sample:coffee",
                "change.edits": json.dumps(EDITS),
            }
            yield f"{page.url}#{urlencode(shown)}"


def problems(tab: Tab) -> list[str]:
    """What axe calls serious or critical: rule, help and element."""
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html']}: {node['failureSummary']}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_axe_finds_nothing_serious_on_any_panel(browser: Any, link: str, width: int, scheme: Any) -> None:
    tab = Tab(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.page.goto(link)
    tab.page.locator(".thumbnail").first.wait_for()
    tab.page.evaluate(AXE.read_text(encoding="utf-8"))
    titles = tab.page.get_by_role("tab").all_inner_texts()
    assert {"Look", "Attribute", "Train", "Operate"} <= set(titles)
    for title in titles:
        tab.open(title)
        tab.page.locator("main").get_by_role("button").first.wait_for()
        tab.page.locator(".status progress").wait_for(state="detached")
        assert problems(tab) == [], title
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, title
    tab.page.close()
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_any_state(browser: Any, link: str, scheme: Any) -> None:
    tab = Tab(browser, viewport={"width": 360, "height": 900}, color_scheme=scheme)
    address, _, shown = link.partition("#")
    for name, differing in STATES.items():
        tab.page.goto("about:blank")
        tab.page.goto(f"{address}#{urlencode({**dict(parse_qsl(shown)), **differing})}")
        tab.page.locator(SHOWN[name]).first.wait_for()
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        assert problems(tab) == [], name
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, name
    for panel, button in QUESTIONS.items():
        tab.page.goto("about:blank")
        tab.page.goto(f"{address}#{urlencode({**dict(parse_qsl(shown)), 'panel': panel})}")
        if panel == "train":
            tab.page.get_by_label("Publish as").fill("tuned")
        tab.page.get_by_role("button", name=button, exact=True).click()
        tab.page.locator(".confirmed").wait_for()
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        assert problems(tab) == [], panel
    tab.page.close()
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_axe_finds_nothing_serious_in_a_run(browser: Any, link: str, width: int, scheme: Any) -> None:
    tab = Tab(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.page.goto(f"{link.partition('#')[0]}#{urlencode(GENERATED)}")
    tab.page.get_by_role("button", name="Run", exact=True).click()
    tab.page.locator("section[data-side=after] .end", has_text="end:").wait_for()
    tab.page.locator(".status progress").wait_for(state="detached")
    tab.page.evaluate(AXE.read_text(encoding="utf-8"))
    tab.page.locator("summary", has_text="Stored directions").click()
    tab.page.locator("ul.directions li").first.wait_for()
    for colour in ("lens", "logprob", "norm", f"{BLOCK}:{DIRECTION}"):
        tab.page.get_by_label("Colour of tokens").select_option(colour)
        tab.page.locator("section[data-side=after] .piece").last.click()
        tab.page.locator("section.details").wait_for()
        assert problems(tab) == [], colour
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, colour
    tab.page.close()
    assert tab.problems == []


def test_axe_finds_nothing_serious_in_the_question_for_a_token(
    tab: Tab, serve: Serve, tmp_path: Path
) -> None:
    now_s = time.time()
    _, token = TokenFile(tmp_path).add("full", Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)
    guarded = serve(models={}, tokens=True, data_dir=tmp_path)
    with trocar.connect(guarded.address, token=token) as client, client.page() as page:
        tab.page.goto(page.url)
        tab.page.get_by_label("Token").wait_for()
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        assert problems(tab) == []
        tab.page.goto("about:blank")


@pytest.mark.parametrize("panel", ["train", "operate", "attribute"])
def test_wide_tables_fold_into_cards_on_a_telephone(browser: Any, link: str, panel: str) -> None:
    tab = Tab(browser, viewport={"width": 360, "height": 900})
    shown = {"panel": panel, "attribute.method": "health"}
    address, _, others = link.partition("#")
    tab.page.goto(f"{address}#{urlencode({**dict(parse_qsl(others)), **shown})}")
    cells = tab.page.locator(".folding tbody td")
    cells.first.wait_for()
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    assert tab.page.locator(".scrolled").evaluate_all(wide) == 0
    titles = cells.evaluate_all('all => all.map(one => getComputedStyle(one, "::before").content)')
    assert '"none"' not in titles
    assert "none" not in titles
    table = tab.page.locator(".folding").first
    row = table.get_by_role("row").filter(has=tab.page.get_by_role("rowheader")).first
    assert row.get_by_role("cell").count() >= 3  # still a table for screen readers
    tab.page.close()
    assert tab.problems == []
