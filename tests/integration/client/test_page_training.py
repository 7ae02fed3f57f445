"""The page's panel of trainers in a real browser: fits as they run, control, publishing, and owners."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import trocar
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import Serve
from tests.support.servers.waiting import wait_until
from trocar._page.frames import CONTENT_TYPE, message_frame, trailers_frame
from trocar_api.v1 import fit_pb2
from trocar_server.auth import Scope, TokenFile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODELS = {"resnet18": {"weights": "random:0"}}
MANY_EPOCHS = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu") as running:
        yield running


@pytest.fixture
def trainer(client: trocar.Client) -> Iterator[trocar.training.Trainer]:
    made = make_trainer(client)
    yield made
    made.close()


def make_trainer(client: trocar.Client) -> trocar.training.Trainer:
    return client.train(
        "resnet18",
        head=4,
        trainable=("layer4", "fc"),
        gradient_edits=trocar.training.gradient_edit("fc.*", "clamp", -0.01, 0.01),
        saved_tensors=trocar.training.save_on_disk(0, min_bytes=1),
    )


def samples() -> Any:
    random = np.random.default_rng(3)
    return random.normal(size=(8, 3, 32, 32)).astype(np.float32), np.arange(8) % 4


def open_trainer(tab: Tab, url: str, trainer: trocar.training.Trainer) -> None:
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
    tab: Tab, url: str, trainer: trocar.training.Trainer, tmp_path: Path
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


def test_losses_that_are_not_numbers_are_shown(
    tab: Tab, url: str, client: trocar.Client, tmp_path: Path
) -> None:
    inputs, targets = samples()
    broken = np.full_like(inputs[:4], np.nan)
    data = (np.concatenate([inputs, broken]), np.concatenate([targets, targets[:4]]))
    with client.train("resnet18", head=4, trainable="fc", on_nonfinite="skip") as trainer:
        history = trainer.fit(data, epochs=1, batch_size=4, shuffle=False)
        losses = [event["loss"] for event in history if event.kind == "step"]
        assert [np.isnan(loss) for loss in losses] == [False, False, True]
        open_trainer(tab, url, trainer)
        tab.page.get_by_role("status").get_by_text("finished").wait_for()
        drawn = tab.page.locator("figure.curves", has_text="Loss")
        assert "training NaN" in drawn.locator("figcaption").inner_text()
        curve = drawn.locator("path.curve-0").get_attribute("d")
        assert re.sub(r"[\d. ]", "", curve) == "ML"  # the finite ones


EVENT_COUNT = 130_000
"""More than a function takes as arguments in Chromium."""


def test_a_fit_of_very_many_events_is_shown(tab: Tab, url: str, trainer: trocar.training.Trainer) -> None:
    def event(number: int) -> bytes:
        kind = "finished" if number == EVENT_COUNT - 1 else "step"
        made = fit_pb2.FitEvent(number=number, kind=kind)
        made.facts.update({"step": number, "loss": 1 / (number + 1)})
        return message_frame(fit_pb2.WatchFitResponse(event=made).SerializeToString())

    body = b"".join(map(event, range(EVENT_COUNT))) + trailers_frame(0, "")
    headers = {"content-type": CONTENT_TYPE}
    tab.page.route("**/*/WatchFit", lambda route: route.fulfill(status=200, headers=headers, body=body))
    open_trainer(tab, url, trainer)
    tab.page.get_by_role("status").get_by_text("finished").wait_for()
    assert last_number(tab) == EVENT_COUNT - 1
    assert tab.page.get_by_role("img", name="Loss").count() == 1


def test_a_fit_that_follows_another_at_once_is_followed(
    tab: Tab, url: str, trainer: trocar.training.Trainer, tmp_path: Path
) -> None:
    open_trainer(tab, url, trainer)
    tab.page.get_by_text("no fit yet").wait_for()
    trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
    tab.page.get_by_role("img", name="Loss").wait_for()
    assert tab.page.get_by_text("no fit yet").count() == 0
    waiting: list[Any] = []

    def hold(route: Any) -> None:
        """The page sees the trainer fitting only: no list that it gets says otherwise."""
        waiting.append(route)

    tab.page.route("**/*/ListTrainers", hold)
    trainer.cancel()
    tab.page.get_by_role("status").get_by_text("cancelled").wait_for()
    wait_until(lambda: trainer.info().state == "ready")
    trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
    begun = last_number(tab)
    for route in waiting:
        route.continue_()
    tab.page.unroute("**/*/ListTrainers")
    wait_until(lambda: last_number(tab) > begun + 3)
    shown = saved_events(tab, tmp_path)
    assert (shown[0]["number"], shown[0]["kind"]) == (begun + 1, "started")


def test_curves_leave_when_the_next_fit_begins(tab: Tab, url: str, trainer: trocar.training.Trainer) -> None:
    trainer.fit(samples(), epochs=2, batch_size=4)
    open_trainer(tab, url, trainer)
    loss = tab.page.get_by_role("img", name="Loss")
    loss.wait_for()
    waiting: list[Any] = []

    def hold(route: Any) -> None:
        waiting.append(route)

    tab.page.route("**/*/WatchFit", hold)
    trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
    loss.wait_for(state="detached")
    assert tab.page.get_by_role("button", name="Save as events.json").count() == 0
    waiting[0].continue_()
    loss.wait_for()
    trainer.cancel()
    tab.page.get_by_role("status").get_by_text("cancelled").wait_for()


BREAK_OFF = """
const own = window.fetch;
let isBroken = false;
window.fetch = async (address, options) => {
  const reply = await own(address, options);
  if (isBroken || !address.endsWith("/WatchFit")) return reply;
  isBroken = true;
  const reader = reply.body.getReader();
  let count = 0;
  return new Response(new ReadableStream({
    async pull(controller) {
      count += 1;
      if (count > 1) return controller.error(new TypeError("network error"));
      controller.enqueue((await reader.read()).value);
    },
  }), { headers: reply.headers });
};
"""
"""The first reply to WatchFit breaks off, as where a proxy ends."""


def test_a_fit_is_followed_on_after_its_reply_broke_off(
    tab: Tab, url: str, trainer: trocar.training.Trainer, tmp_path: Path
) -> None:
    tab.page.add_init_script(BREAK_OFF)
    trainer.start_fit(samples(), epochs=MANY_EPOCHS, batch_size=4)
    open_trainer(tab, url, trainer)
    wait_until(lambda: last_number(tab) >= 0)
    begun = last_number(tab)
    wait_until(lambda: last_number(tab) > begun + 3)
    assert tab.page.get_by_role("alert").count() == 0
    numbers = [event["number"] for event in saved_events(tab, tmp_path)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_fit_is_paused_resumed_and_cancelled(tab: Tab, url: str, trainer: trocar.training.Trainer) -> None:
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
    tab: Tab, url: str, trainer: trocar.training.Trainer, client: trocar.Client
) -> None:
    open_trainer(tab, url, trainer)
    tab.page.get_by_text("no fit yet").wait_for()
    with published_name(client) as name:
        ask_to_publish(tab, name)
        said = tab.page.get_by_text(f"Published as {name}").or_(tab.page.get_by_role("alert"))
        said.wait_for()
        assert "Published as" in said.inner_text()  # otherwise the failure has the alert's words
        assert client.model(name).state == "loaded"
        tab.page.locator("header option", has_text=name).wait_for(state="attached")
        ask_to_publish(tab, "resnet18")
        tab.page.get_by_role("alert").get_by_text("ALREADY_EXISTS").wait_for()


def test_a_publication_without_an_answer_stays_in_doubt(
    tab: Tab, url: str, trainer: trocar.training.Trainer, client: trocar.Client
) -> None:
    def lose_the_reply(route: Any) -> None:
        route.fetch()
        route.abort()

    tab.page.route("**/*/PublishTrainer", lose_the_reply)
    open_trainer(tab, url, trainer)
    with published_name(client) as name:
        ask_to_publish(tab, name)
        tab.page.get_by_role("alert").get_by_text("UNAVAILABLE").wait_for()
        tab.page.get_by_role("alert").wait_for(state="detached")  # the page has reached the server again
        assert f"{name} may be published" in tab.page.locator("main p[role=status]").inner_text()
        assert client.model(name).state == "loaded"
    tab.problems.clear()  # the browser itself reports calls that were cut off


@contextmanager
def published_name(client: trocar.Client) -> Iterator[str]:
    """A name of its own, which is free again in the end."""
    name = f"tuned-{uuid4().hex[:8]}"
    try:
        yield name
    finally:
        if name in [model.model_id for model in client.models()]:
            client.unpublish(name)


def ask_to_publish(tab: Tab, name: str) -> None:
    tab.page.get_by_label("Publish as").fill(name)
    confirm(tab, "Publish")


def test_copied_code_shows_the_same_events(
    tab: Tab, url: str, trainer: trocar.training.Trainer, server: RunningServer, tmp_path: Path
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
