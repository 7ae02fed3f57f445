"""The page's panel for operators in a real browser: who has it, and what it does."""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import trocar
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.serving import Serve
from trocar._page.frames import CONTENT_TYPE, message_frame, trailers_frame
from trocar_server.auth import Scope, TokenFile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODELS = {"squeezenet1_1": {"weights": "random:0"}}
CAT = Path(trocar.__file__).parent / "_page" / "static" / "cat.jpg"


@pytest.fixture
def open_with(tab: Tab, serve: Serve, tmp_path: Path) -> Any:
    """Open the page of a guarded server with a token of some scopes; return a client with all of them."""
    now_s = time.time()

    def token(name: str, scopes: Any) -> str:
        made = TokenFile(tmp_path).add(name, scopes, expires_at_s=int(now_s) + 3600, now_s=now_s)[1]
        assert made is not None
        return made

    tokens = {"all": token("all", Scope), "run": token("run", (Scope.READ, Scope.RUN))}
    limits = {"feature_cache_bytes": 4 << 20}
    guarded = serve(models=MODELS, tokens=True, data_dir=tmp_path, limits=limits)
    client = trocar.connect(guarded.address, token=tokens["all"])
    page = client.page()

    def open_page(name: str) -> trocar.Client:
        tab.page.goto(f"{page.url}#panel=operate&token={tokens[name]}")
        tab.page.locator("header option").first.wait_for(state="attached")
        return client

    open_page.tokens = tokens  # type: ignore[attr-defined]  # of the server
    open_page.address = guarded.address  # type: ignore[attr-defined]
    yield open_page
    tab.page.goto("about:blank")
    page.close()
    client.close()


def test_only_administrators_have_the_panel(tab: Tab, open_with: Any) -> None:
    open_with("run")
    tab.page.get_by_role("button", name="cat").click()
    tab.page.locator("table.best").wait_for()
    assert tab.page.get_by_role("tab", name="Operate").count() == 0
    tab.page.evaluate("sessionStorage.clear()")  # a link does not replace the tab's own token
    tab.page.goto("about:blank")
    open_with("all")
    tab.page.get_by_role("heading", name="Server").wait_for()


def test_the_panel_stays_when_the_server_is_busy_for_a_moment(tab: Tab, open_with: Any) -> None:
    open_with("all")
    tab.page.get_by_role("heading", name="Server").wait_for()
    busy = trailers_frame(8, "the server is busy")
    headers = {"content-type": CONTENT_TYPE}
    tab.page.route("**/*/Drain", lambda route: route.fulfill(status=200, headers=headers, body=busy))
    tab.page.get_by_role("button", name="Drain").click()
    tab.page.get_by_role("button", name="Yes, drain").click()
    tab.page.get_by_role("alert").get_by_text("RESOURCE_EXHAUSTED").wait_for()
    tab.page.get_by_role("button", name="Try again").click()
    tab.page.get_by_role("alert").wait_for(state="detached")
    for _ in range(2):  # one may have been under way before
        with tab.page.expect_response("**/*/Drain"):
            pass
    assert tab.page.get_by_role("heading", name="Server").count() == 1


def test_models_and_limits_are_the_servers(tab: Tab, open_with: Any) -> None:
    client = open_with("all")
    tab.page.get_by_role("heading", name="Server").wait_for()
    info = client.server_info()
    (model,) = client.models()
    row = tab.page.get_by_role("table", name="Models").locator("tbody tr").inner_text()
    assert [model.model_id, "loaded", model.weights] == row.split("\t")[:3]
    features = tab.page.get_by_role("table", name="Features").locator("tbody th").all_inner_texts()
    assert features == [feature.name for feature in info.features]
    limits = tab.page.get_by_role("table", name="Limits").locator("tbody tr").all_inner_texts()
    assert f"max_batch\t{info.limits.max_batch:,}" in limits


def test_queues_callers_and_caches_are_those_of_the_status(tab: Tab, open_with: Any) -> None:
    client = open_with("all")
    for _ in range(2):
        client.extract("squeezenet1_1", CAT, "/out", options=trocar.options(cache=True))
    queues, callers, caches = (
        tab.page.get_by_role("table", name=name).locator("tbody tr")
        for name in ("Queues", "Callers", "Caches")
    )
    tab.page.get_by_role("table", name="Caches").get_by_text("50 %").wait_for()
    status = client.status()
    (cache,) = status.caches
    assert (cache.entry_count, cache.hit_count, cache.miss_count) == (1, 1, 1)
    assert 0 < cache.byte_count < cache.max_bytes == 4 << 20
    assert caches.inner_text().split("\t")[:2] == ["replies", "1"]
    assert caches.inner_text().split("\t")[3:] == ["1", "1", "50 %"]
    assert queues.inner_text().split("\t") == ["squeezenet1_1", "0 of 1", "0", "0 s"]
    names = [row.split("\t")[0] for row in callers.all_inner_texts()]
    assert set(names) <= {one.caller or "(the server)" for one in status.callers}
    assert "all" in names
    python, command = [one.get_attribute("data-text") for one in tab.page.locator("button.copy").all()]
    assert (command, "client.status()" in python) == ("trocar status", True)


def test_copied_code_shows_what_the_panel_shows(
    tab: Tab, open_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_with("all")
    tab.page.get_by_role("heading", name="Queues").wait_for()
    python, command = [one.get_attribute("data-text") for one in tab.page.locator("button.copy").all()]
    monkeypatch.setenv("TROCAR_SERVER", open_with.address)
    monkeypatch.setenv("TROCAR_TOKEN", open_with.tokens["all"])
    for words in (["-c", python], ["-m", *shlex.split(command)]):
        done = warm_python.run(
            [sys.executable, *words],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "squeezenet1_1" in done.stdout
        assert "replies" in done.stdout


def test_a_server_is_drained_and_takes_work_again(tab: Tab, open_with: Any) -> None:
    client = open_with("all")
    tab.page.get_by_role("button", name="Drain", exact=True).click()
    assert not client.server_info().is_draining
    tab.page.get_by_role("button", name="Yes, drain").click()
    tab.page.get_by_text("refused: draining").wait_for()
    assert client.server_info().is_draining
    tab.page.get_by_role("button", name="Accept work again").click()
    tab.page.get_by_text("accepted").wait_for()
    assert not client.server_info().is_draining


def test_a_reload_that_fails_says_why(tab: Tab, open_with: Any) -> None:
    open_with("all")
    tab.page.get_by_role("button", name="Reload the configuration", exact=True).click()
    tab.page.get_by_role("button", name="Yes, reload the configuration").click()
    alert = tab.page.get_by_role("alert")
    alert.wait_for()
    assert "no configuration file" in alert.inner_text()


def reload(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Reload the configuration", exact=True).click()
    tab.page.get_by_role("button", name="Yes, reload the configuration").click()


def test_what_a_reload_has_changed_leaves_with_the_next_one(tab: Tab, open_with: Any) -> None:
    open_with("all")
    unchanged = message_frame(b"") + trailers_frame(0, "")
    headers = {"content-type": CONTENT_TYPE}
    tab.page.route(
        "**/ReloadConfig", lambda route: route.fulfill(status=200, headers=headers, body=unchanged)
    )
    reload(tab)
    tab.page.get_by_text("Nothing has changed.").wait_for()
    tab.page.unroute_all()
    reload(tab)
    tab.page.get_by_role("alert").wait_for()
    assert tab.page.get_by_text("Nothing has changed.").count() == 0


def test_numbers_of_a_look_that_failed_are_called_older(tab: Tab, open_with: Any) -> None:
    open_with("all")
    tab.page.get_by_role("heading", name="Queues").wait_for()
    busy = trailers_frame(8, "the server is busy")
    headers = {"content-type": CONTENT_TYPE}
    tab.page.route("**/GetServerStatus", lambda route: route.fulfill(status=200, headers=headers, body=busy))
    older = tab.page.get_by_text("these numbers are older")
    older.wait_for()
    tab.page.unroute_all()
    older.wait_for(state="detached")
