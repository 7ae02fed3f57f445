"""The page's panel of trainers in a real browser: fits as they run, control, publishing, and owners."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import Serve
from tests.support.servers.waiting import wait_until
from trocar_server.auth import Scope, TokenFile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODELS = {"resnet18": {"weights": "random:0"}}
MANY_EPOCHS = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu") as running:
        yield running


@pytest.fixture
def trainer(client: trocar.Client) -> Iterator[trocar.Trainer]:
    made = make_trainer(client)
    yield made
    made.close()


def make_trainer(client: trocar.Client) -> trocar.Trainer:
    return client.train(
        "resnet18",
        head=4,
        trainable=("layer4", "fc"),
        gradient_rules=trocar.clamp("fc.*", -0.01, 0.01),
        saved_tensors=trocar.spool(0, min_bytes=1),
    )


def samples() -> Any:
    random = np.random.default_rng(3)
    return random.normal(size=(8, 3, 32, 32)).astype(np.float32), np.arange(8) % 4


def open_trainer(tab: Tab, url: str, trainer: trocar.Trainer) -> None:
    tab.page.goto(f"{url}#panel=train&train.trainer={trainer.trainer_id}")
    tab.page.get_by_role("heading", name=trainer.trainer_id).wait_for()


def confirm(tab: Tab, label: str) -> None:
    """Press a button, and the one that it asks with."""
    tab.page.get_by_role("button", name=label, exact=True).click()
    tab.page.get_by_role("button", name=f"Yes, {label.lower()}").click()


def last_number(tab: Tab) -> int:
    """Number of the last event that is shown."""
    found = re.search(r"Event (\d+):", tab.page.locator("main").inner_text())
    return int(found[1]) if found else -1


def saved_events(tab: Tab, folder: Path) -> list[dict[str, Any]]:
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Save as events.json").click()
    download.value.save_as(folder / "events.json")
    events: list[dict[str, Any]] = json.loads((folder / "events.json").read_text())
    return events


def test_curves_are_of_the_events_of_the_fit(
    tab: Tab, url: str, trainer: trocar.Trainer, tmp_path: Path
) -> None:
    history = trainer.fit(samples(), epochs=2, batch_size=4, eval=samples())
    open_trainer(tab, url, trainer)
    tab.page.get_by_role("status").get_by_text("finished").wait_for()
    shown = saved_events(tab, tmp_path)
    assert [(one["number"], one["kind"]) for one in shown] == [(one.number, one.kind) for one in history]
    assert [one["facts"].get("loss") for one in shown] == [one.get("loss") for one in history]
    labels = tab.page.locator("figure.curves figcaption").all_inner_texts()
    expected = ("Loss", "Metrics", "Gradient norm", "Changed gradient elements", "Spool, bytes")
    assert [label for label in expected if not any(text.startswith(label) for text in labels)] == []
    last = [event["loss"] for event in history if event.kind == "step"][-1]
    drawn = next(text for text in labels if text.startswith("Loss"))
    assert f"{last:.4g}" in drawn


def test_a_fit_is_paused_resumed_and_cancelled(tab: Tab, url: str, trainer: trocar.Trainer) -> None:
    trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
    open_trainer(tab, url, trainer)
    tab.page.get_by_role("img", name="Loss").wait_for()  # while it runs
    tab.page.get_by_role("button", name="Pause").click()
    wait_until(lambda: trainer.info().state == "paused")
    tab.page.locator("button:not([disabled])", has_text="Resume").click()
    wait_until(lambda: trainer.info().state == "fitting")
    tab.page.get_by_role("button", name="Cancel the fit").click()
    tab.page.get_by_role("button", name="No", exact=True).click()
    assert trainer.info().state == "fitting"
    confirm(tab, "Cancel the fit")
    wait_until(lambda: trainer.info().state == "ready")
    tab.page.get_by_role("status").get_by_text("cancelled").wait_for()


def test_weights_are_published_after_a_confirmation(
    tab: Tab, url: str, trainer: trocar.Trainer, client: trocar.Client
) -> None:
    open_trainer(tab, url, trainer)
    tab.page.get_by_text("no fit yet").wait_for()
    tab.page.get_by_label("Publish as").fill("tuned")
    confirm(tab, "Publish")
    tab.page.get_by_text("Published as tuned").wait_for()
    assert client.model("tuned").state == "loaded"
    assert tab.page.locator("header option", has_text="tuned").count() == 1
    tab.page.get_by_label("Publish as").fill("resnet18")
    confirm(tab, "Publish")
    assert "ALREADY_EXISTS" in tab.page.get_by_role("alert").inner_text()
    client.unpublish("tuned")


def test_copied_code_shows_the_same_events(
    tab: Tab, url: str, trainer: trocar.Trainer, server: RunningServer, tmp_path: Path
) -> None:
    history = trainer.fit(samples(), epochs=1, batch_size=4)
    open_trainer(tab, url, trainer)
    python, command = [one.get_attribute("data-text") for one in tab.page.locator("button.copy").all()]
    lines = run([sys.executable, "-c", python], server.address).splitlines()
    assert [line.split()[:2] for line in lines] == [[str(one.number), one.kind] for one in history]
    assert "finished" in run([sys.executable, "-m", *command.split()], server.address)


def run(command: list[str], address: str) -> str:
    environment = {**os.environ, "TROCAR_SERVER": address}
    done = warm_python.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_no_event_is_lost_when_the_server_restarts(tab: Tab, tmp_path: Path) -> None:
    with server_processes() as processes:
        first = processes.start(tmp_path / "data", models=MODELS)
        with trocar.connect(first.address) as client, client.page() as page:
            trainer = make_trainer(client)
            trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
            open_trainer(tab, page.url, trainer)
            tab.page.get_by_role("img", name="Loss").wait_for()
            assert first.terminate() == 0
            processes.start(tmp_path / "data", models=MODELS, port=int(first.address.rpartition(":")[2]))
            begun = last_number(tab)
            wait_until(lambda: last_number(tab) > begun + 3)
            numbers = [event["number"] for event in saved_events(tab, tmp_path)]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            tab.page.goto("about:blank")


def test_callers_see_their_own_trainers_only(browser: Any, serve: Serve, tmp_path: Path) -> None:
    now_s = time.time()
    scopes = (Scope.READ, Scope.RUN, Scope.TRAIN)
    tokens = {
        name: TokenFile(tmp_path).add(name, scopes, expires_at_s=int(now_s) + 3600, now_s=now_s)[1] or ""
        for name in ("alice", "bob")
    }
    guarded = serve(models=MODELS, tokens=True, data_dir=tmp_path)
    tabs = {name: Tab(browser.new_context()) for name in tokens}  # each with a session of its own
    with trocar.connect(guarded.address, token=tokens["alice"]) as alice, alice.page() as page:
        trainer = make_trainer(alice)
        for name, tab in tabs.items():
            tab.page.goto(f"{page.url}#panel=train&train.trainer={trainer.trainer_id}&token={tokens[name]}")
        tabs["alice"].page.get_by_role("heading", name=trainer.trainer_id).wait_for()
        tabs["bob"].page.get_by_text("You have no trainer").last.wait_for()
        for tab in tabs.values():
            assert tab.page.get_by_role("tab", name="Operate").count() == 0
            tab.page.goto("about:blank")
            tab.page.close()
            assert tab.problems == []
