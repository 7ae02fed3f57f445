"""Dictionaries and lists of tensors as one argument of a forward: as plain calls and hooks in torch."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trocar
from tests.support.models.transformers_folders import FAMILIES, loaded_by_transformers, save_family
from tests.support.servers.running_server import RunningServer, running_server
from trocar.errors import InputRejectedError, InvalidArgumentError


class Neck(nn.Module):
    """Takes a dictionary, and a list of values of different sizes with dictionaries among them."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Conv2d(3, 4, 3)
        self.fuse = nn.Linear(8, 2)

    def forward(self, batch: dict[str, Any], levels: list[torch.Tensor] | None = None) -> dict[str, Any]:
        value = self.low(batch["image"] * batch["mask"]).mean((2, 3))
        other = batch["meta"]["scale"][:, None] * value if "meta" in batch else value
        for level in levels or ():
            other = other + level.mean((1, 2))[:, None]
        return {"logits": self.fuse(torch.cat([value, other], 1)), "parts": [value, {"other": other}]}


class Positional(Neck):
    """Takes the dictionary as its only, positional argument."""

    def forward(self, batch: dict[str, Any], /) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(batch)


def neck() -> nn.Module:
    """Build a model."""
    torch.manual_seed(5)
    return Neck().eval()


def positional() -> nn.Module:
    """Build a model."""
    torch.manual_seed(5)
    return Positional().eval()


IMAGE = {"dtype": "float32", "shape": ["batch", 3, "height", "width"]}
MASK = {"dtype": "float32", "shape": ["batch", 1, "height", "width"]}
INPUTS = {
    'batch["image"]': IMAGE,
    'batch["mask"]': MASK,
    'batch["meta"]["scale"]': {"dtype": "float32", "shape": ["batch"], "optional": True},
    "levels": {"dtype": "float32", "optional": True},
}


@pytest.fixture(scope="module")
def detr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detr")
    save_family("detr", folder)
    return folder


@pytest.fixture(scope="module")
def server(detr: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        "neck": {"factory": f"{__name__}:neck", "inputs": INPUTS, "input_shape": (3, 8, 8)},
        "positional": {
            "factory": f"{__name__}:positional",
            "inputs": {'["image"]': IMAGE, '["mask"]': MASK},
            "input_shape": (3, 8, 8),
        },
        "detr": {"source": f"hf:{detr}"},
    }
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models=models, device="cpu", data_dir=data_dir) as running:
        yield running


def given(rows: int = 2, side: int = 8, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    batch = {
        "image": random.normal(size=(rows, 3, side, side)).astype(np.float32),
        "mask": (random.random((rows, 1, side, side)) > 0.3).astype(np.float32),
        "meta": {"scale": random.normal(size=rows).astype(np.float32)},
    }
    levels = [random.normal(size=(rows, 4 + i, 5)).astype(np.float32) for i in range(2)]
    return {"batch": batch, "levels": levels}


def as_torch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_torch(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_torch(each) for each in value]
    return torch.from_numpy(value)


def sent(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "levels": trocar.tensor_list(inputs["levels"])}


def plain(module: nn.Module, inputs: Any) -> dict[str, Any]:
    with torch.no_grad():
        found: dict[str, Any] = module(**as_torch(inputs))
    return found


TAPS = ["low", "fuse/in", '/out["parts"][1]["other"]', '/in(batch)["image"]', '/in(batch)["meta"]["scale"]']


@pytest.mark.parametrize(("rows", "side"), [(2, 8), (5, 9), (1, 12), (3, 8)])
def test_dictionaries_and_lists_reach_the_forward(client: trocar.Client, rows: int, side: int) -> None:
    inputs = given(rows, side, seed=rows)
    module = neck()
    expected = plain(module, inputs)
    maps = client.extract("neck", sent(inputs), [*TAPS, '/out["logits"]', "/in(levels)[1]"])
    low = module.get_submodule("low")
    with torch.no_grad():
        value = low(torch.from_numpy(inputs["batch"]["image"] * inputs["batch"]["mask"]))
    np.testing.assert_array_equal(maps["low"], value)
    np.testing.assert_array_equal(maps['/out["logits"]'], expected["logits"])
    np.testing.assert_array_equal(maps['/out["parts"][1]["other"]'], expected["parts"][1]["other"])
    np.testing.assert_array_equal(maps['/in(batch)["image"]'], inputs["batch"]["image"])
    np.testing.assert_array_equal(maps['/in(batch)["meta"]["scale"]'], inputs["batch"]["meta"]["scale"])
    np.testing.assert_array_equal(maps["/in(levels)[1]"], inputs["levels"][1])


GRADIENT = '/grad_in["image"]'


def test_dry_runs_edits_gradients_and_streams_know_them(client: trocar.Client) -> None:
    inputs, module = given(), neck()
    plan = client.plan("neck", sent(inputs), TAPS)
    maps = client.extract("neck", sent(inputs), TAPS)
    assert {name: each.shape for name, each in plan.feature_maps.items()} == {
        name: maps[name].shape for name in maps
    }
    edit = trocar.edit('/in(batch)["mask"]', "set", 1.0)
    changed = given()
    changed["batch"]["mask"] = np.ones_like(changed["batch"]["mask"])
    found = client.extract("neck", sent(inputs), ['/out["logits"]'], edits=[edit])
    np.testing.assert_array_equal(found['/out["logits"]'], plain(module, changed)["logits"])
    image = '/in(batch)["image"]'
    grads = client.gradients(
        "neck", sent(inputs), of=trocar.value('/out["logits"]', function="square"), at=[image]
    )
    tensors = as_torch(inputs)
    tensors["batch"]["image"].requires_grad_(True)
    module(**tensors)["logits"].square().sum().backward()
    np.testing.assert_allclose(
        grads[GRADIENT],
        tensors["batch"]["image"].grad,
        rtol=1e-5,
        atol=1e-7,
    )
    with client.extract_stream("neck", [sent(inputs), sent(given(3))], ["low"]) as stream:
        sizes = [result.maps["low"].shape[0] for result in stream if result.maps]
    assert sizes == [2, 3]


def test_a_dictionary_may_be_the_positional_argument(client: trocar.Client) -> None:
    batch = given()["batch"]
    del batch["meta"]
    with torch.no_grad():
        expected = positional()(as_torch(batch))["logits"]
    maps = client.extract("positional", {"": batch}, ['/out["logits"]'])
    np.testing.assert_array_equal(maps['/out["logits"]'], expected)


def test_training_on_dictionaries_equals_torch(client: trocar.Client, tmp_path: Path) -> None:
    trainer = client.train(
        "neck",
        losses=trocar.training.loss_term("cross_entropy", at='/out["logits"]'),
        optimizer=trocar.training.sgd(lr=0.1),
        seed=0,
    )
    module = neck().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        inputs, labels = given(seed=step), np.array([0, 1])
        result = trainer.step(sent(inputs), labels)
        loss = nn.functional.cross_entropy(module(**as_torch(inputs))["logits"], torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert result.loss == loss.item()
    weights = load_file(trainer.export(tmp_path / "trained.safetensors"))
    for name, value in module.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_a_local_server_takes_them(tmp_path: Path) -> None:
    inputs = given()
    with trocar.connect(
        "local", models={"mine": {"factory": f"{__name__}:neck", "inputs": INPUTS, "input_shape": (3, 8, 8)}}
    ) as local:
        maps = local.extract("mine", sent(inputs), ['/out["logits"]'])
    np.testing.assert_array_equal(maps['/out["logits"]'], plain(neck(), inputs)["logits"])


def test_labels_of_detr_are_a_list_of_dictionaries(client: trocar.Client, detr: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.normal(size=(2, 3, 64, 64)).astype(np.float32)
    labels = [
        {
            "class_labels": random.integers(0, 2, size=count),
            "boxes": random.uniform(0.2, 0.4, size=(count, 4)).astype(np.float32),
        }
        for count in (1, 2)
    ]
    model = loaded_by_transformers(FAMILIES["detr"][0], detr)
    with torch.no_grad():
        expected = model(pixel_values=torch.from_numpy(pixels), labels=as_torch(labels))
    inputs: dict[str, Any] = {"pixel_values": pixels, "labels": trocar.tensor_list(labels)}
    maps = client.extract(
        "detr", inputs, ['/out["loss"]', '/out["loss_dict"]["loss_bbox"]', '/out["logits"]']
    )
    np.testing.assert_array_equal(maps['/out["logits"]'], expected.logits)
    np.testing.assert_array_equal(maps['/out["loss"]'], expected.loss)
    np.testing.assert_array_equal(maps['/out["loss_dict"]["loss_bbox"]'], expected.loss_dict["loss_bbox"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"batch": {"image": np.zeros((1, 3, 8, 8), np.float32)}}, 'batch\\["mask"\\]. is missing'),
        ({**given(), "extra": {"a": np.zeros(2, np.float32)}}, 'extra\\["a"\\]'),
    ],
)
def test_what_the_signature_does_not_have_is_refused(
    client: trocar.Client, inputs: dict[str, Any], message: str
) -> None:
    if "levels" in inputs:
        inputs = sent(inputs)
    with pytest.raises(InputRejectedError, match=message):
        client.extract("neck", inputs, ["low"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["levels[0]", "levels[2]"], "'levels' has no position 1"),
        (["levels[0]", 'levels["a"]'], "has positions and keys"),
        (["levels", "levels[0]"], "'levels' is given, and inputs within it too"),
        (["levels[x]"], "is no name of an input"),
        (["levels" + "[0]" * 9], "with at most 8 steps"),
        (['levels["a"]', 'levels["a"][0]'], "given twice, or inputs within it too"),
    ],
)
def test_names_that_contradict_each_other_are_refused(
    client: trocar.Client, names: list[str], message: str
) -> None:
    inputs = {name: np.zeros((1, 2), np.float32) for name in names}
    with pytest.raises(InvalidArgumentError, match=message):
        client.extract("neck", inputs, ["low"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"batch": {}}, "the dictionary 'batch' is empty"),
        ({"batch": {3: np.zeros(2)}}, "the key 3; keys are strings"),
    ],
)
def test_what_cannot_be_a_dictionary_is_refused_at_once(
    client: trocar.Client, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, trocar.errors.EmptyBatchError), match=message):
        client.extract("neck", inputs, ["low"])


class Rows:
    """A data set object whose samples are dictionaries of tensors, as torch's are."""

    def __init__(self, count: int) -> None:
        self.inputs = given(count, 8, seed=9)

    def __len__(self) -> int:
        return len(self.inputs["levels"][0])

    def __getitem__(self, index: int) -> tuple[dict[str, Any], int]:
        batch = self.inputs["batch"]
        image, mask = torch.from_numpy(batch["image"][index]), torch.from_numpy(batch["mask"][index])
        scale = torch.from_numpy(batch["meta"]["scale"][index : index + 1])[0]
        levels = trocar.tensor_list(level[index] for level in self.inputs["levels"])
        return {"batch": {"image": image, "mask": mask, "meta": {"scale": scale}}, "levels": levels}, 1


def test_a_data_set_gives_dictionaries(client: trocar.Client, tmp_path: Path) -> None:
    rows, taps = Rows(5), ["low", '/out["logits"]', "/in(levels)[1]"]
    report = trocar.extract_dataset(client, "neck", rows, taps, tmp_path, batch=2)
    assert report.row_count == 5
    features = trocar.read_features(tmp_path)
    for start in (0, 2, 4):
        batch = {
            "batch": {
                "image": rows.inputs["batch"]["image"][start : start + 2],
                "mask": rows.inputs["batch"]["mask"][start : start + 2],
                "meta": {"scale": rows.inputs["batch"]["meta"]["scale"][start : start + 2]},
            },
            "levels": [level[start : start + 2] for level in rows.inputs["levels"]],
        }
        logits = plain(neck(), batch)["logits"]
        np.testing.assert_array_equal(features['/out["logits"]'][start : start + 2], logits)
    np.testing.assert_array_equal(features["/in(levels)[1]"], rows.inputs["levels"][1])


def test_an_analysis_cuts_dictionaries_into_batches(client: trocar.Client) -> None:
    inputs = given(5)
    low = neck().get_submodule("low")
    with torch.no_grad():
        value = low(torch.from_numpy(inputs["batch"]["image"] * inputs["batch"]["mask"]))
    most = value.abs().amax((0, 2, 3)).numpy()
    threshold = float(np.median(most))
    dead = client.dead_channels("neck", sent(inputs), ["low"], batch_size=2, threshold=threshold)
    assert dead.rows[0].dead == tuple(np.flatnonzero(most <= threshold).tolist())
    wrong: Any = {**sent(inputs), "levels": np.ones((4, 2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"the arguments have \[4, 5\] rows"):
        client.dead_channels("neck", wrong, ["low"])
