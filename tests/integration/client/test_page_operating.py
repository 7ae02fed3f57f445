"""The page's panel for operators in a real browser: who has it, and what it does."""

import time
from pathlib import Path
from typing import Any

import pytest

import trocar
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.serving import Serve
from trocar_server.auth import Scope, TokenFile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODELS = {"squeezenet1_1": {"weights": "random:0"}}


@pytest.fixture
def open_with(tab: Tab, serve: Serve, tmp_path: Path) -> Any:
    """Open the page of a guarded server with a token of some scopes; return a client with all of them."""
    now_s = time.time()

    def token(name: str, scopes: Any) -> str:
        made = TokenFile(tmp_path).add(name, scopes, expires_at_s=int(now_s) + 3600, now_s=now_s)[1]
        assert made is not None
        return made

    tokens = {"all": token("all", Scope), "run": token("run", (Scope.READ, Scope.RUN))}
    guarded = serve(models=MODELS, tokens=True, data_dir=tmp_path)
    client = trocar.connect(guarded.address, token=tokens["all"])
    page = client.page()

    def open_page(name: str) -> trocar.Client:
        tab.page.goto(f"{page.url}#panel=operate&token={tokens[name]}")
        tab.page.locator("header option").first.wait_for(state="attached")
        return client

    yield open_page
    tab.page.goto("about:blank")
    page.close()
    client.close()


def test_only_administrators_have_the_panel(tab: Tab, open_with: Any) -> None:
    open_with("run")
    tab.page.get_by_role("button", name="cat").click()
    tab.page.locator("table.best").wait_for()
    assert tab.page.get_by_role("tab", name="Operate").count() == 0
    tab.page.goto("about:blank")
    open_with("all")
    tab.page.get_by_role("heading", name="Server").wait_for()


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
