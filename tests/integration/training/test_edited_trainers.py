"""Trainers with stored directions in their passes, against hooks in plain torch and transformers."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

import trocar
from tests.integration.training.test_trainers import (
    SEED,
    assert_equal,
    base_model,
    batches,
    exported,
    make_trainer,
    with_head,
)
from tests.support.models.causal_models import save_causal
from tests.support.servers.running_server import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VECTOR = np.random.default_rng(0).normal(size=256)
"""At layer3 of resnet18."""
WARM = ["a kind word", "thank you so much", "what a lovely day"]
COLD = ["go away now", "what a dreadful day", "I do not care"]
TEXTS = [WARM[:2], COLD[:2], [WARM[2], COLD[2]], WARM[1:]]
"""Batches for the causal loss."""
STEER = trocar.edit("layer3", "steer", "axis", alpha=0.3, units="norm")
OUT = trocar.edit("layer3", "project_out", "axis")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("edited")
    save_causal("llama", root / "llama")
    return root


@contextmanager
def serving(folder: Path, data_dir: Path) -> Iterator[trocar.Client]:
    """A server, and its client."""
    llama = {"source": f"hf:{folder / 'llama'}"}
    models: dict[str, Any] = {"resnet18": {"weights": "random:0"}, "llama": llama, "other": llama}
    with (
        running_server(models=models, device="cpu", data_dir=data_dir) as server,
        trocar.connect(server.address) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    with serving(folder, tmp_path_factory.mktemp("data")) as connected:
        store(connected)
        yield connected


@pytest.fixture(autouse=True)
def _few_trainers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "client" in request.fixturenames:
        connected: trocar.Client = request.getfixturevalue("client")
        for info in connected.trainers():
            connected.trainer(info.trainer_id).close()


def store(client: trocar.Client) -> None:
    """Store a direction for each model."""
    direction = trocar.Direction.of(VECTOR, mean_norm=5.0)
    client.store_direction("resnet18", "axis", "layer3", direction, replace=True)
    moods = ["warm"] * len(WARM) + ["cold"] * len(COLD)
    options: dict[str, Any] = {"kind": "mean_difference", "folds": 0, "name": "warm", "replace": True}
    client.fit_direction("llama", [*WARM, *COLD], moods, "layer[1]", **options)


def steered(x: torch.Tensor) -> torch.Tensor:
    shift = torch.from_numpy(VECTOR / np.linalg.norm(VECTOR) * 5.0 * 0.3).float()
    return x + shift[:, None, None]


def projected(x: torch.Tensor) -> torch.Tensor:
    unit = torch.from_numpy(VECTOR[None] / np.linalg.norm(VECTOR)).float()
    vectors = x.movedim(1, -1)
    return (vectors - (vectors @ unit.T) @ unit).movedim(-1, 1).contiguous()


def trained_plainly(
    changes: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    given: Sequence[tuple[Any, Any]],
    trainable: tuple[str, ...],
) -> tuple[Any, list[float]]:
    """Fine-tune in plain torch, with hooks at layer3, a trainable part and a new head."""
    model = with_head(base_model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(trainable)
    for path, module in model.named_modules():
        module.training = any(parameter.requires_grad for parameter in module.parameters()) or path == ""
    for change in changes:
        model.layer3.register_forward_hook(lambda _, __, output, change=change: change(output))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9)
    losses = []
    for images, labels in given:
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.as_tensor(images)), torch.as_tensor(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def edited(client: trocar.Client, *edits: trocar.Edit, **options: Any) -> trocar.training.Trainer:
    chosen: dict[str, Any] = {"gradient_edits": (), "edits": edits, **options}
    return make_trainer(client, chosen.pop("trainable", ("layer4", "fc")), **chosen)


@pytest.mark.parametrize("trainable", [("layer4", "fc"), ("layer3", "layer4", "fc")])
def test_steps_are_those_of_torch_with_a_hook_that_adds_the_vector(
    client: trocar.Client, tmp_path: Path, trainable: tuple[str, ...]
) -> None:
    expected, losses = trained_plainly([steered], batches(4), trainable)
    trainer = edited(client, STEER, trainable=trainable)
    given = batches(4)
    found = [trainer.step(*batch).loss for batch in given[:3]]
    found.append(trainer.forward_backward(*given[3]).loss)
    trainer.optimizer_step()
    assert found == losses
    assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)


def test_steps_are_those_of_torch_with_a_hook_that_takes_a_direction_out(
    client: trocar.Client, tmp_path: Path
) -> None:
    expected, losses = trained_plainly([steered, projected], batches(4), ("layer3", "layer4", "fc"))
    trainer = edited(client, STEER, OUT, trainable=("layer3", "layer4", "fc"))
    assert [trainer.step(*batch).loss for batch in batches(4)] == losses
    assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)


def test_evaluation_extraction_and_the_published_model_have_no_edit(client: trocar.Client) -> None:
    images, labels = batches(1)[0]
    first, other = edited(client, STEER), edited(client)
    assert first.evaluate(images, labels).loss == other.evaluate(images, labels).loss
    first.step(images, labels)
    first.publish("tuned")
    try:
        maps = [one.extract(images, ["layer3", "fc"]) for one in (first, other)]
        np.testing.assert_array_equal(maps[0]["layer3"], maps[1]["layer3"])
        served = client.extract("tuned", images, ["layer3", "fc"])
        np.testing.assert_array_equal(served["layer3"], maps[1]["layer3"])
        np.testing.assert_array_equal(served["fc"], maps[0]["fc"])
    finally:
        client.unpublish("tuned")


@pytest.mark.parametrize("trainable", [("layer4", "fc"), ("fc",)])
def test_a_fit_is_that_of_torch_with_features_kept_or_not(
    client: trocar.Client, tmp_path: Path, trainable: tuple[str, ...]
) -> None:
    images = np.concatenate([images for images, _ in batches(4)])
    labels = np.concatenate([labels for _, labels in batches(4)])
    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(SEED + epoch)) for epoch in (0, 1)]
    given = [(images[part], labels[part]) for order in orders for part in order.split(4)]
    expected, losses = trained_plainly([steered], given, trainable)
    for is_cached in (True, False):
        trainer = edited(client, STEER, trainable=trainable)
        history = trainer.fit(
            (images, labels), epochs=2, batch_size=4, eval=(images, labels), feature_cache=is_cached
        )
        assert any(event.get("done") for event in history.of_kind("cache")) == is_cached
        assert [event["loss"] for event in history.of_kind("step")] == losses
        assert_equal(exported(trainer, tmp_path / "fitted.safetensors"), expected)
        last, again = history.evaluations[-1], trainer.evaluate(images, labels)
        assert last["loss"] == pytest.approx(again.loss, rel=1e-5)
        trainer.close()


def test_what_is_computed_again_has_the_same_bits(client: trocar.Client, tmp_path: Path) -> None:
    weights, losses = [], []
    for again in ((), ("layer3", "layer4")):
        edit = trocar.edit("layer3.0.conv1", "steer", "inner", alpha=0.5)
        direction = trocar.Direction.of(VECTOR)
        client.store_direction("resnet18", "inner", "layer3.0.conv1", direction, replace=True)
        trainer = edited(client, edit, STEER, OUT, trainable=(), activation_checkpointing=again)
        losses.append([trainer.step(*batch).loss for batch in batches(3)])
        weights.append(exported(trainer, tmp_path / f"{len(again)}.safetensors"))
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_a_trainer_keeps_its_directions_over_a_restart(folder: Path, tmp_path: Path) -> None:
    expected, losses = trained_plainly([steered], batches(4), ("layer4", "fc"))
    given = batches(4)
    with serving(folder, tmp_path / "data") as client:
        store(client)
        trainer = edited(client, STEER)
        trainer_id = trainer.trainer_id
        found = [trainer.step(*batch).loss for batch in given[:2]]
        client.store_direction(
            "resnet18", "axis", "layer3", trocar.Direction.of(np.ones(256), mean_norm=9.0), replace=True
        )
        found.append(trainer.step(*given[2]).loss)
        client.delete_directions("resnet18", "axis")
    with serving(folder, tmp_path / "data") as client:
        trainer = client.trainer(trainer_id)
        found.append(trainer.step(*given[3]).loss)
        assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)
        with pytest.raises(trocar.errors.UnknownDirectionError):
            edited(client, STEER)
    assert found == losses


def test_texts_are_steered_while_a_model_is_trained_and_not_when_it_writes(
    client: trocar.Client, folder: Path, tmp_path: Path
) -> None:
    stored = client.direction("llama", "warm", at="layer[1]")
    vector, length = stored.vectors[0], stored.about["mean_norm"]
    shift = torch.from_numpy(vector / np.linalg.norm(vector) * length * 0.5).float()
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder / "llama")
    model: Any = LlamaForCausalLM.from_pretrained(folder / "llama", attn_implementation="sdpa").train()

    def hook(_: Any, __: Any, output: Any) -> Any:
        return (output[0] + shift, *output[1:]) if isinstance(output, tuple) else output + shift

    handle = model.model.layers[1].register_forward_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    edit = trocar.edit("layer[1]", "steer", "warm", alpha=0.5, units="norm")
    trainer = client.train(
        "llama", losses="causal_lm", optimizer=trocar.training.sgd(lr=1e-3), seed=7, edits=edit
    )
    for texts in TEXTS:
        encoding = tokenizer(texts, padding=True, return_tensors="pt")
        labels = encoding["input_ids"].masked_fill(encoding["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        loss = model(
            input_ids=encoding["input_ids"], attention_mask=encoding["attention_mask"], labels=labels
        ).loss
        loss.backward()
        optimizer.step()
        assert trainer.step(texts).loss == pytest.approx(loss.item(), rel=1e-6)
    handle.remove()
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    for name, value in model.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    prompt = tokenizer("what a", return_tensors="pt")["input_ids"]
    written = model.eval().generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    run = client.generate(trainer.trainer_id, "what a", max_new_tokens=8, stop_token_ids=[])
    assert list(run.as_inputs()[0]) == written[0].tolist()


def test_an_adapter_is_trained_beside_a_direction(client: trocar.Client) -> None:
    edit = trocar.edit("layer[1]", "steer", "warm", alpha=0.5, units="norm")
    options: dict[str, Any] = {"losses": "causal_lm", "seed": 7}
    variants: list[dict[str, Any]] = [{"lora": 2, "edits": edit}, {"edits": edit}, {}]
    adapter, whole, plain = (client.train("llama", **options, **more) for more in variants)
    losses = [one.step(TEXTS[0]).loss for one in (adapter, whole, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # a new adapter changes nothing
    assert abs(losses[1] - losses[2]) > 1e-3


def test_a_direction_of_another_place_or_model_is_refused(client: trocar.Client) -> None:
    edits = [trocar.edit(f"layer[{index}]", "steer", "warm") for index in (1, 0)]
    words = r"edits\[1\]\.direction.*not fitted at 'model\.layers\.0', but at model\.layers\.1"
    with pytest.raises(trocar.errors.DirectionMismatchError, match=words):
        client.train("llama", losses="causal_lm", edits=edits)
    with pytest.raises(
        trocar.errors.UnknownDirectionError, match="it is of model 'llama', not of model 'other'"
    ):
        client.train("other", losses="causal_lm", edits=trocar.edit("layer[1]", "steer", "warm"))
    assert client.trainers() == []


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            trocar.edit("layer3", "scale", 2.0),
            r"edits\[0\]: a trainer takes `steer`, `project_out` and `cap`",
        ),
        (trocar.edit("layer3", "steer", VECTOR), r"edits\[0\]: a trainer takes `steer`"),
        (trocar.edit("layer3", "steer", "axis", samples=[0]), r"edits\[0\]\.region.*edits whole values"),
        (
            trocar.edit("layer3", "steer", "axis", positions=trocar.positions(prompt=[0])),
            r"edits\[0\]\.positions.*edits whole values",
        ),
        (
            trocar.edit(
                "layer3", "steer", "axis", positions=trocar.positions(when=trocar.gate("axis", above=0))
            ),
            r"edits\[0\]\.positions.*edits whole values",
        ),
        (trocar.edit("layer3", "steer", "axis", order="after"), r"edits\[0\]\.order.*leave the order out"),
        (trocar.edit("layer3/grad_out", "project_out", "axis"), "grad_out"),
    ],
)
def test_other_edits_are_refused_in_words(client: trocar.Client, edit: trocar.Edit, words: str) -> None:
    with pytest.raises(trocar.errors.TrocarError, match=words):
        edited(client, edit)
    assert client.trainers() == []


def test_a_direction_that_a_new_head_has_no_room_for_is_refused(client: trocar.Client) -> None:
    client.store_direction("resnet18", "old", "fc", trocar.Direction.of(np.ones(1000)), replace=True)
    with pytest.raises(
        trocar.errors.EditShapeMismatchError,
        match=r"'fc': steer does not fit .* a direction of shape \(1000,\)",
    ):
        edited(client, trocar.edit("fc", "steer", "old"))


def test_what_is_no_edit_is_refused_before_it_is_sent(client: trocar.Client) -> None:
    with pytest.raises(TypeError, match=r"create them with trocar\.edit"):
        client.train("resnet18", edits=[trocar.training.gradient_edit("fc", "zero")])  # type: ignore[list-item]
