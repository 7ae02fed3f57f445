"""Edits in the page at values that are not the usual ones: within a tuple, or with the channels last."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from transformers import BertForSequenceClassification

import trocar
from tests.support.models import text_models
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

TEXTS, LAYER, TEXT = "texts", "bert.encoder.layer.0.attention", "the cat sat"
SWIN, STAGE = "swin", "features.1"
CAT = Path(trocar.__file__).parent / "_page" / "static" / "cat.jpg"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("classifier")
    text_models.save_text_classifier(folder, BertForSequenceClassification)
    models = {TEXTS: {"source": f"hf:{folder}"}, SWIN: {"source": "swin_t", "weights": "random:0"}}
    with running_server(models=models, device="cpu") as running:
        yield running


def settled(tab: Tab) -> None:
    """Wait until what is shown is that of the edits on the page."""
    tab.page.locator('section.after[aria-busy="false"]').wait_for()


def edit_of(tab: Tab) -> dict[str, Any]:
    """The one edit of the address."""
    (edit,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["change.edits"][0])
    found: dict[str, Any] = edit
    return found


@pytest.mark.parametrize(
    ("place", "port"),
    [("its output", "[0]"), ("its input", "/in"), ("gradient of its output", "/grad_out[0]")],
)
def test_places_of_a_value_within_a_tuple_are_selectors(tab: Tab, url: str, place: str, port: str) -> None:
    tab.page.goto(f"{url}#panel=change&model={TEXTS}&text={TEXT.replace(' ', '+')}&module={LAYER}")
    tab.page.get_by_role("combobox", name="Place").select_option(label=place)
    tab.page.get_by_role("button", name="Add an edit of").click()
    settled(tab)
    assert edit_of(tab)["at"] == f"{LAYER}{port}"
    assert tab.page.get_by_role("alert").count() == 0


def open_stage(tab: Tab, url: str, panel: str) -> None:
    tab.page.goto(f"{url}#panel={panel}&model={SWIN}&sample=cat&module={STAGE}")


def test_channels_that_are_last_are_shown(tab: Tab, url: str, client: trocar.Client) -> None:
    open_stage(tab, url, "look")
    strongest = int(tab.page.locator(".thumbnail span").first.inner_text())
    values = client.extract(SWIN, CAT, STAGE)[STAGE][0]
    assert values.shape == (56, 56, 96)
    assert strongest == abs(values).mean(axis=(0, 1)).argmax()
    size = tab.page.locator(".thumbnail canvas").first.evaluate("one => [one.height, one.width]")
    assert size == [56, 56]


def test_channels_rows_and_columns_are_edited_where_channels_are_last(
    tab: Tab, url: str, client: trocar.Client, server: RunningServer, tmp_path: Path, monkeypatch: Any
) -> None:
    open_stage(tab, url, "change")
    tab.page.get_by_role("button", name="Add an edit of").click()
    settled(tab)
    tab.page.locator(".changes .thumbnail").first.click()
    for name, text in (("rows", "2:8"), ("columns", "-3:")):
        tab.page.get_by_label(f"only {name}").fill(text)
        tab.page.keyboard.press("Enter")
    tab.page.locator("ol.edits", has_text="rows 2:8, columns -3:").wait_for()
    settled(tab)
    (channel,) = edit_of(tab)["channels"]
    after = tab.saved("Save what came out as .npy")
    expected = client.extract(SWIN, CAT, STAGE)[STAGE].copy()
    expected[:, 2:8, -3:, channel] = 0
    assert np.array_equal(after, expected)
    (tmp_path / "cat.jpg").write_bytes(CAT.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    assert np.array_equal(tab.copied_python()["after"][STAGE], after)


@pytest.mark.parametrize("operation", ["mean_ablate", "project_out"])
def test_means_and_directions_are_of_channels_that_are_last(
    tab: Tab, url: str, client: trocar.Client, operation: str
) -> None:
    open_stage(tab, url, "change")
    tab.page.get_by_role("button", name="Add an edit of").click()
    settled(tab)
    tab.page.get_by_label("Operation").select_option(operation)
    plain = client.extract(SWIN, CAT, STAGE)[STAGE]
    if operation == "mean_ablate":
        tab.page.get_by_role("button", name="Means of the samples").click()
        tab.page.wait_for_function("() => document.querySelector('.edit [placeholder*=mean]').value")
        expected = np.broadcast_to(np.float32(edit_of(tab)["reference"]), plain.shape)
    else:
        tab.page.locator(".changes .thumbnail").first.click()
        tab.page.locator("p", has_text="Channels ").wait_for()
        channel = int(tab.page.locator('.changes .thumbnail[aria-pressed="true"] span').inner_text())
        expected = plain.copy()
        expected[..., channel] = 0
    settled(tab)
    np.testing.assert_allclose(tab.saved("Save what came out as .npy"), expected, atol=1e-5)


def test_a_text_that_looks_like_a_file_is_a_text_in_copied_code(
    tab: Tab, url: str, client: trocar.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    tab.page.goto(f"{url}#model={TEXTS}&text=setup.py&module=bert.embeddings")
    tab.page.locator(".thumbnail").first.wait_for()
    expected = client.extract(TEXTS, trocar.texts("setup.py"), "bert.embeddings")["bert.embeddings"]
    assert np.array_equal(tab.copied_python()["maps"]["bert.embeddings"], expected)
