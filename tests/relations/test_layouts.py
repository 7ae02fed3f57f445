"""What dimensions mean, against passes with other sizes: no dimension is called what it is not."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.relations.families import FAMILIES
from tests.relations.hosting import tables
from tests.relations.layouts import Place, places
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig
from trocar_server.engine.execute.arguments import signature_of
from trocar_server.engine.host.deployment import make_deployment
from trocar_server.models import load_model
from trocar_server.surgery import PassGuard, parse_selector, resolve
from trocar_server.surgery.axes.layout import Layout

AXES = {"t": "tokens", "u": "target_tokens"}
"""Names of masked axes by their letter; those of other letters may be any."""
KNOWN_SHARE = 0.95


@cache
def layouts_of(name: str) -> dict[str, Layout | None]:
    """Return the layouts of a family's values as the server derives them, by selector."""
    family = FAMILIES[name]
    spec = model_spec(name, ModelConfig(**tables([name])[name]))
    hosted = load_model(spec, torch.device("cpu"), Path("unused"))
    deployment = make_deployment(hosted, 1, max_queue=1)
    inputs = family.inputs(np.random.default_rng(0), 3)
    signature = signature_of(list(inputs), [torch.from_numpy(value) for value in inputs.values()])
    recording = deployment.record(signature, PassGuard())
    selectors = [place.selector for place in places(name)]
    values = resolve(map(parse_selector, selectors), recording)
    return {text: target.layout for text, ((target, _),) in zip(selectors, values, strict=True)}


def problem(place: Place, layout: Layout) -> str:
    """Return what a layout says wrongly of a value; empty where everything is right."""
    is_pair = {"batch", "images"} <= set(layout.axes)
    if layout.batch != place.samples and not (place.is_folded and (is_pair or layout.batch is None)):
        return f"samples are dimension {place.samples}, not {layout.batch}"
    for letter, dim in place.lengths.items():
        wanted = AXES.get(letter)
        if wanted is not None and wanted not in layout.axes[dim] and layout.axes[dim] != "tokens":
            return f"dimension {dim} is {wanted}, not '{layout.axes[dim]}'"
        if dim in {layout.channels, layout.batch}:
            return f"dimension {dim} moves with a length"
    return f"channels are dimension {layout.channels}" if layout.channels in place.spatial else ""


@pytest.mark.parametrize("name", FAMILIES)
def test_no_dimension_is_called_what_it_is_not(name: str) -> None:
    layouts = layouts_of(name)
    wrong = {
        place.selector: (place.shape, layout.axes, text)
        for place in places(name)
        if (layout := layouts[place.selector]) is not None
        and layout.is_known
        and (text := problem(place, layout))
    }
    assert not wrong


def test_nearly_all_values_are_known() -> None:
    counts = Counter(
        layout is not None and layout.is_known for name in FAMILIES for layout in layouts_of(name).values()
    )
    assert counts[True] >= KNOWN_SHARE * counts.total()
