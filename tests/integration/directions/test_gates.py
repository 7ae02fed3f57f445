"""Gates of edits, against hooks that read the direction in this process."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.causal_models import save_causal
from tests.support.servers.running_server import running_server
from trocar.errors import DirectionMismatchError, EditNotPossibleError, InvalidArgumentError

TEXT = "The river ran past the mill, and the mill turned slowly."
COUNT = 12
RANDOM = np.random.default_rng(3)
READ, PUSH = RANDOM.normal(size=16), RANDOM.normal(size=16) * 4
TWO = RANDOM.normal(size=(2, 16))
ABOVE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_causal("llama", folder)


@pytest.fixture(scope="module")
def client(folder: Path, model: Any) -> Iterator[trocar.Client]:
    tables: Any = {"llama": {"source": f"hf:{folder}"}}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        connected.store_direction("llama", "read", "layer[0]", trocar.Direction.of(READ, 0.05))
        connected.store_direction("llama", "read", "layer[1]", trocar.Direction.of(READ, -0.3))
        connected.store_direction("llama", "two", "layer[0]", trocar.Direction.of(TWO))
        yield connected


class Hooked:
    """Steers the output of block 1 where block 0, or it itself, reads above the threshold."""

    def __init__(self, model: Any, *, own: bool = False) -> None:
        self.blocks, self.own = model.model.layers, own
        self.open: list[bool] = []
        self.read: Any = None

    def __enter__(self) -> Self:
        keep, change = (self.blocks[i].register_forward_hook for i in (0, 1))
        self.handles = [keep(self.keep), change(self.change)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def keep(self, _: Any, __: Any, output: Any) -> None:
        self.read = output[0] if isinstance(output, tuple) else output

    def change(self, _: Any, __: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        read, bias = (value, -0.3) if self.own else (self.read, 0.05)
        is_open = read @ torch.tensor(READ).float() + bias > ABOVE
        self.open += is_open[0].tolist()
        changed = value + is_open[..., None] * torch.tensor(PUSH).float()
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


def gated(at: str = "layer[0]") -> trocar.Edit:
    gate = trocar.gate("read", at, above=ABOVE)
    return trocar.edit("layer[1]", "steer", PUSH, positions=trocar.positions(when=gate))


@pytest.mark.parametrize("own", [False, True])
def test_an_edit_is_made_where_the_direction_reads_enough(
    client: trocar.Client, model: Any, own: bool
) -> None:
    ids = client.generate("llama", TEXT, max_new_tokens=1).as_inputs()[0][:-1]
    with Hooked(model, own=own) as hooked, torch.inference_mode():
        expected = model(torch.tensor([ids])).logits
    edit = gated("layer[1]" if own else "layer[0]")
    maps = client.extract("llama", TEXT, '/out["logits"]', edits=[edit])
    np.testing.assert_allclose(maps['/out["logits"]'], expected.numpy(), rtol=1e-4, atol=1e-4)
    assert 0 < sum(hooked.open) < len(hooked.open)


def test_a_gate_opens_at_each_generated_token(client: trocar.Client, model: Any) -> None:
    run = client.generate("llama", TEXT, edits=[gated()], max_new_tokens=COUNT, stop_token_ids=[])
    ids = run.as_inputs()[0]
    prompt = torch.tensor([ids[:-COUNT]])
    with Hooked(model) as hooked, torch.inference_mode():
        settings: Any = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None}
        expected = model.generate(prompt, **settings)[0]
    assert ids == expected.tolist()
    (count,) = run.edit_counts
    of_prompt, generated = hooked.open[: prompt.shape[1]], hooked.open[prompt.shape[1] :]
    assert (count.prompt, count.generated) == (sum(of_prompt), sum(generated))
    assert count.gated_out == len(hooked.open) - sum(hooked.open) > 0


def test_a_gate_narrows_the_positions_of_an_edit(client: trocar.Client) -> None:
    gate = trocar.gate("read", "layer[0]", above=ABOVE)
    both = trocar.positions(prompt=slice(0, 8), when=gate)
    edits = [trocar.edit("layer[1]", "steer", PUSH, positions=both)]
    maps = client.extract("llama", TEXT, ["layer[0]", "layer[1]"], edits=edits)
    plain = client.extract("llama", TEXT, ["layer[1]"])["model.layers.1"]
    changed = (maps["model.layers.1"] != plain).any(-1)[0]
    is_open = maps["model.layers.0"][0] @ READ + 0.05 > ABOVE
    np.testing.assert_array_equal(changed, is_open & (np.arange(len(is_open)) < 8))
    (count,) = client.generate("llama", TEXT, edits=edits, max_new_tokens=3).edit_counts
    assert (count.prompt, count.generated, count.gated_out) == (changed.sum(), 0, 8 - changed.sum())


@pytest.mark.parametrize(
    ("operation", "values"), [("steer", ("read", 3.0)), ("scale", (0.5,)), ("project_out", ("read",))]
)
def test_a_gate_that_is_shut_or_open_everywhere(
    client: trocar.Client, operation: Any, values: tuple[Any, ...]
) -> None:
    def edited(**options: Any) -> Any:
        edits = [trocar.edit("layer[1]", operation, *values, **options)]
        return client.extract("llama", TEXT, "layer[1]", edits=edits)["model.layers.1"]

    plain = client.extract("llama", TEXT, "layer[1]")["model.layers.1"]
    shut = trocar.positions(when=trocar.gate("read", "layer[0]", above=1e9))
    wide = trocar.positions(when=trocar.gate("read", "layer[0]", above=-1e9, below=1e9))
    np.testing.assert_array_equal(edited(positions=shut), plain)
    np.testing.assert_array_equal(edited(positions=wide), edited())


def test_what_is_no_gate_is_refused(client: trocar.Client) -> None:
    late = trocar.positions(when=trocar.gate("read", "layer[1]", above=0))
    with pytest.raises(EditNotPossibleError, match="computed later in the pass; use an earlier place"):
        client.extract("llama", TEXT, "layer[1]", edits=[trocar.edit("layer[0]", "zero", positions=late)])
    with pytest.raises(InvalidArgumentError, match="a gate is for edits alone"):
        client.extract("llama", TEXT, trocar.tap("layer[1]", positions=late))
    with pytest.raises(InvalidArgumentError, match="'read' has 2 places; name one"):
        client.extract("llama", TEXT, "layer[1]", edits=[gated("")])
    two = trocar.positions(when=trocar.gate("two", above=0))
    with pytest.raises(DirectionMismatchError, match="has 2 vectors, and a gate needs one"):
        client.extract("llama", TEXT, "layer[1]", edits=[trocar.edit("layer[1]", "zero", positions=two)])
    with pytest.raises(InvalidArgumentError, match="takes no gate"):
        client.store_edits("llama", "gated", [gated()])
    with pytest.raises(ValueError, match="needs above=, below= or both"):
        trocar.gate("read")


def test_a_gate_shows_as_it_was_written() -> None:
    assert repr(gated()).endswith(
        "positions=trocar.positions(when=trocar.gate('read', 'layer[0]', above=0.1)))"
    )
