"""Detection models of transformers: images of different sizes in one batch, equal to transformers alone."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import load_file

import trocar
from tests.support.models.transformers_folders import (
    FAMILIES,
    images_of,
    loaded_by_transformers,
    processed_images,
    realigned,
    save_family,
    save_image_processor,
)
from tests.support.servers.running_server import RunningServer, running_server

OUTPUTS = ['/out["logits"]', '/out["pred_boxes"]']
SIZES = [(30, 47), (64, 20), (41, 41)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detr")
    save_family("detr", folder)
    save_image_processor("detr", folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return loaded_by_transformers(FAMILIES["detr"][0], folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    whole = tmp_path_factory.mktemp("whole")
    save_family("detr", whole)
    T.DetrImageProcessorPil(do_resize=False).save_pretrained(whole)
    unpadded = tmp_path_factory.mktemp("unpadded")
    save_family("detr", unpadded)
    T.DetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 70}, do_pad=False).save_pretrained(
        unpadded
    )
    folders = {"detr": folder, "whole": whole, "unpadded": unpadded}
    tables: dict[str, Any] = {name: {"source": f"hf:{each}"} for name, each in folders.items()}
    limits, data_dir = {"max_request_bytes": 64 << 20}, tmp_path_factory.mktemp("data")
    with running_server(models=tables, device="cpu", limits=limits, data_dir=data_dir) as running:
        yield running


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], [(30, 47)] * 2], ids=["different", "one", "equal"])
def test_images_of_any_sizes_give_what_transformers_gives(
    client: trocar.Client, model: Any, folder: Path, sizes: Any
) -> None:
    pictures = images_of(sizes)
    inputs = processed_images(folder, pictures)
    with torch.inference_mode():
        wanted = model(**inputs)
    maps = client.extract("detr", pictures, [*OUTPUTS, "/in(pixel_mask)"])
    np.testing.assert_array_equal(maps[OUTPUTS[0]], wanted.logits.numpy())
    np.testing.assert_array_equal(maps[OUTPUTS[1]], wanted.pred_boxes.numpy())
    np.testing.assert_array_equal(maps["/in(pixel_mask)"], inputs["pixel_mask"].numpy())


def test_arrays_with_their_mask_are_taken_as_they_are(
    client: trocar.Client, folder: Path, model: Any
) -> None:
    prepared = processed_images(folder, images_of(SIZES))
    inputs = {name: value.numpy() for name, value in prepared.items()}
    with torch.inference_mode():
        wanted = model(**prepared)
    np.testing.assert_array_equal(client.extract("detr", inputs, OUTPUTS)[OUTPUTS[0]], wanted.logits.numpy())
    with pytest.raises(trocar.errors.InputRejectedError, match="'pixel_mask' is given twice"):
        client.extract("detr", {"images": images_of(SIZES), "pixel_mask": inputs["pixel_mask"]}, OUTPUTS)


def test_a_stream_and_gradients_take_images_of_any_sizes(
    client: trocar.Client, folder: Path, model: Any
) -> None:
    batches = [images_of(SIZES), images_of(SIZES[1:]), images_of(SIZES[:1])]
    with client.extract_stream("detr", batches, OUTPUTS[:1]) as stream:
        found = [result.unwrap()[OUTPUTS[0]] for result in stream]
    for pictures, value in zip(batches, found, strict=True):
        with torch.inference_mode():
            np.testing.assert_array_equal(value, model(**processed_images(folder, pictures)).logits.numpy())
    grads = client.gradients("detr", images_of(SIZES), of=trocar.value(OUTPUTS[1]), at=["bbox_predictor"])
    boxes: list[Any] = []
    handle = model.bbox_predictor.register_forward_hook(
        lambda _, __, value: boxes.append(value.requires_grad_())
    )
    model(**processed_images(folder, images_of(SIZES))).pred_boxes.sum().backward()
    handle.remove()
    np.testing.assert_allclose(grads["bbox_predictor/grad_out"], boxes[0].grad.numpy(), rtol=1e-5)


def test_an_edit_changes_the_boxes_of_padded_images(client: trocar.Client) -> None:
    edit = trocar.edit("class_labels_classifier", "zero")
    edited = client.extract("detr", images_of(SIZES), OUTPUTS, edits=[edit])
    assert not edited[OUTPUTS[0]].any()
    np.testing.assert_array_equal(
        edited[OUTPUTS[1]], client.extract("detr", images_of(SIZES), OUTPUTS)[OUTPUTS[1]]
    )


def test_a_dry_run_of_images_of_any_sizes_has_the_outputs(client: trocar.Client) -> None:
    taps = [*OUTPUTS, "model.backbone.**:Conv2d"]
    maps = client.extract("detr", images_of(SIZES), taps)
    plan = client.plan("detr", images_of(SIZES), taps).feature_maps
    assert {name: info.shape for name, info in plan.items()} == {
        name: value.shape for name, value in maps.items()
    }
    assert "padded with zeros" in client.model("detr").preprocessing.description  # type: ignore[union-attr]


def test_images_that_become_too_large_by_padding_are_refused_before_they_are_made(
    client: trocar.Client,
) -> None:
    pictures = images_of([(1, 6_000), (6_000, 1)])
    with pytest.raises(
        trocar.errors.ImageTooLargeError, match=r"the 2 images are padded to 6000 x 6000 pixels"
    ):
        client.extract("whole", pictures, OUTPUTS)
    with pytest.raises(trocar.errors.ImageTooLargeError, match="images of like proportions"):
        client.plan("whole", pictures, OUTPUTS)


def test_a_processor_that_does_not_pad_takes_one_size(client: trocar.Client) -> None:
    assert client.extract("unpadded", images_of([(30, 47)] * 2), OUTPUTS)
    with pytest.raises(trocar.errors.InputRejectedError, match="2 sizes"):
        client.extract("unpadded", images_of(SIZES[:2]), OUTPUTS)


def test_a_trainer_takes_images_of_any_sizes(client: trocar.Client, model: Any, folder: Path) -> None:
    wanted = np.zeros((3, 3, 4), np.float32)
    with torch.inference_mode():
        boxes = model(**processed_images(folder, images_of(SIZES))).pred_boxes
    with client.train(
        "detr",
        losses=trocar.training.loss_term("mse", at=OUTPUTS[1]),
        trainable=["bbox_predictor"],
    ) as trainer:
        loss = trainer.evaluate(images_of(SIZES), wanted).loss
    assert loss == torch.nn.functional.mse_loss(boxes, torch.from_numpy(wanted)).item()


def test_a_folder_of_images_of_any_sizes_is_extracted(
    client: trocar.Client, model: Any, folder: Path, tmp_path: Path
) -> None:
    pictures = images_of(SIZES)
    for index, picture in enumerate(pictures):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "photos" / f"{index}.png")
    trocar.extract_dataset(client, "detr", tmp_path / "photos", OUTPUTS, tmp_path / "features", batch=2)
    features = trocar.read_features(tmp_path / "features")
    for start in (0, 2):
        with torch.inference_mode():
            wanted = model(**processed_images(folder, pictures[start : start + 2]))
        found = features[OUTPUTS[1]][start : start + 2]
        np.testing.assert_array_equal(found, wanted.pred_boxes.numpy())


def test_a_fit_on_a_data_set_of_images_of_any_sizes_equals_torch(
    client: trocar.Client, folder: Path, tmp_path: Path
) -> None:
    pictures = images_of([*SIZES, (50, 33)])
    boxes = np.random.default_rng(2).random((4, 3, 4), np.float32)
    dataset = client.upload_dataset(
        list(zip(map(Image.fromarray, pictures), boxes, strict=True)), name="boxes"
    )
    with client.train(
        "detr",
        losses=trocar.training.loss_term("mse", at=OUTPUTS[1]),
        trainable=["bbox_predictor"],
        optimizer=trocar.training.sgd(lr=0.1),
        seed=0,
    ) as trainer:
        history = trainer.fit(dataset, batch_size=2, shuffle=False, metrics=())
        weights = load_file(trainer.export(tmp_path / "trained.safetensors"))
    own = realigned(loaded_by_transformers(FAMILIES["detr"][0], folder))
    assert history.outcome == "finished", history
    own.requires_grad_(False)
    own.bbox_predictor.requires_grad_(True)
    own.bbox_predictor.train()  # frozen modules stay in eval mode
    optimizer = torch.optim.SGD(own.bbox_predictor.parameters(), lr=0.1)
    torch.manual_seed(0)
    losses = []
    for start in (0, 2):
        found = own(**processed_images(folder, pictures[start : start + 2])).pred_boxes
        loss = torch.nn.functional.mse_loss(found, torch.from_numpy(boxes[start : start + 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert history.losses == losses
    for name, value in own.bbox_predictor.state_dict().items():
        assert torch.equal(weights[f"bbox_predictor.{name}"], value), name
