"""Trainers through the service, against the same schedule in plain torch: bit-equal on a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import trocar
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

if TYPE_CHECKING:
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

SEED = 5


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    """A server with resnet18, and trainers of its own."""
    return serve(models={"resnet18": {"weights": "random:0"}}, data_dir=tmp_path)


def batches(count: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    random = np.random.default_rng(3)
    return [
        (random.normal(size=(4, 3, 32, 32)).astype(np.float32), random.integers(0, 10, 4))
        for _ in range(count)
    ]


def base_model() -> Any:
    torch.manual_seed(0)
    return resnet18(weights=None).eval()


def with_head(model: Any) -> Any:
    torch.manual_seed(SEED)
    model.fc = nn.Linear(512, 10)
    return model


def trained_plainly(trainable: tuple[str, ...], steps: int) -> Any:
    """Fine-tune in plain torch, with the head, clamp and modes that the trainers below have."""
    model = with_head(base_model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(trainable)
    for path, module in model.named_modules():
        module.training = any(parameter.requires_grad for parameter in module.parameters()) or path == ""
    model.fc.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model.fc.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        optimizer.step()
    return model


def make_trainer(
    client: trocar.Client, trainable: tuple[str, ...], **options: Any
) -> trocar.training.Trainer:
    chosen: dict[str, Any] = {
        "head": 10,
        "trainable": trainable,
        "optimizer": trocar.training.sgd(lr=0.05, momentum=0.9),
        "gradient_edits": trocar.training.gradient_edit("fc.*", "clamp", -0.1, 0.1),
        "seed": SEED,
    }
    return client.train("resnet18", **{**chosen, **options})


def exported(trainer: trocar.training.Trainer, path: Path) -> dict[str, torch.Tensor]:
    return load_file(trainer.export(path))


def assert_equal(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    state = expected.state_dict()
    assert found.keys() == state.keys()
    different = [name for name, value in state.items() if not torch.equal(value, found[name])]
    assert different == []


@pytest.mark.parametrize("trainable", [("fc",), ("layer4", "fc"), ("",)])
def test_weights_are_bit_equal_to_plain_torch(
    client: trocar.Client, tmp_path: Path, trainable: tuple[str, ...]
) -> None:
    expected = trained_plainly(trainable, 3)
    trainer = make_trainer(client, () if trainable == ("",) else trainable)
    results = [trainer.step(images, labels) for images, labels in batches(3)]
    assert [result.update_count for result in results] == [1, 2, 3]
    assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)


def test_a_trainer_goes_on_after_a_restart_as_if_there_had_been_none(serve: Serve, tmp_path: Path) -> None:
    from tests.support.servers.running_server import running_server

    settings: dict[str, Any] = {
        "models": {"resnet18": {"weights": "random:0"}},
        "data_dir": tmp_path,
        "device": "cpu",
    }
    expected, given = trained_plainly(("layer4", "fc"), 4), batches(4)
    with running_server(**settings) as first, trocar.connect(first.address) as client:
        trainer = make_trainer(client, ("layer4", "fc"))
        for images, labels in given[:2]:
            trainer.step(images, labels)
        saved = trainer.save("half way")
        trainer.step(*given[2])  # a server that is stopped saves it
        trainer_id = trainer.trainer_id
    with running_server(**settings) as second, trocar.connect(second.address) as client:
        found = client.trainer(trainer_id)
        assert (found.info().update_count, found.info().next_number) == (3, 3)
        assert [entry.number for entry in found.checkpoints()] == [saved.number, saved.number + 1]
        found.step(*given[3])
        assert_equal(exported(found, tmp_path / "tuned.safetensors"), expected)


def test_restore_takes_everything_back(client: trocar.Client, tmp_path: Path) -> None:
    trainer, given = make_trainer(client, ("fc",)), batches(3)
    trainer.step(*given[0])
    trainer.save()
    first = trainer.step(*given[1])
    trainer.step(*given[2])
    assert trainer.restore().update_count == 1
    assert trainer.step(*given[1]).loss == first.loss


def test_a_step_that_is_sent_twice_is_applied_once(client: trocar.Client) -> None:
    trainer, (images, labels) = make_trainer(client, ("fc",)), batches(1)[0]
    first = trainer.step(images, labels, number=0)
    assert trainer.step(images, labels, number=0) == first
    assert trainer.info().update_count == 1
    with pytest.raises(trocar.errors.StepOutOfOrderError) as caught:
        trainer.optimizer_step(number=0)
    assert caught.value.details["next_number"] == "1"


def test_steps_in_flight_are_applied_in_their_order(client: trocar.Client, tmp_path: Path) -> None:
    expected = trained_plainly(("fc",), 4)
    trainer, given = make_trainer(client, ("fc",)), batches(4)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(trainer.step, *given[number], number=number) for number in (3, 1, 2, 0)]
        for call in calls:
            call.result()
    assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)


def test_halves_of_a_step_are_the_whole(client: trocar.Client, tmp_path: Path) -> None:
    expected = trained_plainly(("fc",), 2)
    trainer = make_trainer(client, ("fc",))
    for images, labels in batches(2):
        assert not trainer.forward_backward(images, labels).is_update
        assert trainer.optimizer_step().is_update
    assert_equal(exported(trainer, tmp_path / "tuned.safetensors"), expected)


def test_two_trainers_and_extraction_share_a_base_that_stays_as_it_was(
    client: trocar.Client, running: RunningServer, tmp_path: Path
) -> None:
    images, labels = batches(1)[0]
    before = client.extract("resnet18", images, taps=["layer4", "fc"])
    one, other = make_trainer(client, ("fc",)), make_trainer(client, ("layer4", "fc"), seed=SEED + 1)

    def run(work: int) -> None:
        if work % 3 == 0:
            one.step(images, labels, number=work // 3)
        elif work % 3 == 1:
            other.step(images, labels, number=work // 3)
        else:
            maps = client.extract("resnet18", images, taps=["layer4", "fc"])
            assert np.array_equal(maps["layer4"], before["layer4"])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(12)))
    after = client.extract("resnet18", images, taps=["layer4", "fc"])
    assert np.array_equal(before["fc"], after["fc"])
    state = base_model().state_dict()
    hosted = running.engine.catalogue.loaded("resnet18").module.state_dict()
    assert all(torch.equal(value, hosted[name]) for name, value in state.items())
    assert one.info().byte_count < 200_000  # its head, momentum, and batch norm's buffers
    assert other.info().frozen_element_count == 2_782_784


def test_a_trainer_is_a_model_for_extraction_and_gradients(client: trocar.Client) -> None:
    trainer, (images, labels) = make_trainer(client, ("fc",)), batches(1)[0]
    model = with_head(base_model())
    with torch.no_grad():
        assert np.array_equal(trainer.predict(images), model(torch.from_numpy(images)).numpy())
    weight = trainer.extract(None, taps="fc/param(weight)")["fc/param(weight)"]
    trainer.step(images, labels)
    assert np.array_equal(weight, model.fc.weight.detach().numpy())  # a copy: the step did not change it
    after = trainer.extract(images, taps=["layer4", "fc/param(weight)"])
    assert not np.array_equal(after["fc/param(weight)"], weight)
    gradients = trainer.gradients(images, of=trocar.logit(3), at="layer4")
    assert gradients["layer4"].shape == after["layer4"].shape
    assert client.model(trainer.trainer_id).categories[:2] == ("class 0", "class 1")
    assert trainer.trainer_id not in [model.model_id for model in client.models()]


def test_evaluation_changes_nothing(client: trocar.Client) -> None:
    trainer, (images, labels) = make_trainer(client, ("layer4",)), batches(1)[0]
    before = trainer.evaluate(images, labels)
    assert trainer.evaluate(images, labels) == before
    assert before.accuracy == np.mean(trainer.predict(images).argmax(1) == labels)
    assert trainer.info().next_number == 0


def test_accuracy_is_of_the_labels_that_count(client: trocar.Client) -> None:
    trainer, (images, _) = make_trainer(client, ("fc",)), batches(1)[0]
    found = trainer.predict(images).argmax(1)
    evaluated = trainer.evaluate(images, np.where(np.arange(4) < 3, found, -100))
    assert (evaluated.correct_count, evaluated.label_count, evaluated.sample_count) == (3, 3, 4)
    assert evaluated.accuracy == 1.0


def test_what_is_published_is_a_model_at_once_and_after_a_restart(tmp_path: Path) -> None:
    from tests.support.servers.running_server import running_server

    settings: dict[str, Any] = {
        "models": {"resnet18": {"weights": "random:0"}},
        "data_dir": tmp_path,
        "device": "cpu",
    }
    images, labels = batches(1)[0]
    with running_server(**settings) as first, trocar.connect(first.address) as client:
        with make_trainer(client, ("fc",)) as trainer:
            trainer.step(images, labels)
            assert trainer.publish("tuned", categories=[f"digit {i}" for i in range(10)]) == "tuned"
            predicted = trainer.predict(images)
            with pytest.raises(trocar.errors.ModelConflictError):
                trainer.publish("tuned")
        found = client.extract("tuned", images, taps="/out")["/out"]
        assert np.array_equal(found, predicted)
    with running_server(**settings) as second, trocar.connect(second.address) as client:
        assert np.array_equal(client.extract("tuned", images, taps="/out")["/out"], predicted)
        assert client.model("tuned").categories[9] == "digit 9"
        assert client.trainers() == []


@pytest.mark.parametrize(
    "step", ["engine.host.deployments.load_model", "training.files.published.model_spec"]
)
def test_a_model_that_cannot_be_hosted_is_not_published(
    client: trocar.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    trainer, (images, labels) = make_trainer(client, ("fc",)), batches(1)[0]
    trainer.step(images, labels)
    failure = ServiceError(ErrorReason.WEIGHTS_MISMATCH, "the weights do not fit")
    with monkeypatch.context() as patch:
        patch.setattr(f"trocar_server.{step}", Mock(side_effect=failure))
        with pytest.raises(trocar.errors.WeightsMismatchError, match="the weights do not fit"):
            trainer.publish("tuned")
    assert [model.model_id for model in client.models()] == ["resnet18"]
    assert list(tmp_path.rglob("published/*")) == []
    assert trainer.publish("tuned") == "tuned"
    assert np.array_equal(client.extract("tuned", images, taps="/out")["/out"], trainer.predict(images))


def test_others_see_nothing_of_a_trainer(running: RunningServer) -> None:
    images, labels = batches(1)[0]
    with (
        trocar.connect(running.address, token="alice") as alice,
        trocar.connect(running.address, token="bob") as bob,
    ):
        mine = make_trainer(alice, ("fc",))
        mine.save()
        theirs = trocar.training.Trainer(bob, mine.trainer_id)
        calls: list[Any] = [
            theirs.info,
            lambda: theirs.step(images, labels, number=0),
            lambda: theirs.forward_backward(images, labels, number=0),
            lambda: theirs.optimizer_step(number=0),
            lambda: theirs.evaluate(images, labels),
            theirs.save,
            theirs.restore,
            theirs.checkpoints,
            lambda: theirs.publish("stolen"),
            lambda: theirs.export("stolen.safetensors"),
        ]
        for call in calls:
            with pytest.raises(trocar.errors.UnknownTrainerError):
                call()
        for call in (theirs.predict, lambda inputs: theirs.extract(inputs, "fc")):
            with pytest.raises(trocar.errors.UnknownModelError):
                call(images)
        with pytest.raises(trocar.errors.UnknownModelError):
            bob.modules(mine.trainer_id)
        assert bob.trainers() == []
        theirs.close()
        assert mine.info().update_count == 0
        with pytest.raises(trocar.errors.InvalidArgumentError):
            alice.unload(mine.trainer_id)


def test_every_problem_of_a_description_is_in_one_error(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.TrainerInvalidError) as caught:
        client.train(
            "resnet18",
            head=10,
            trainable=["layr4"],
            optimizer=trocar.training.adamw(lr=1e-3, beta=0.9),
            gradient_edits=trocar.training.gradient_edit("nothing.*", "clamp", -1, 1),
            losses=trocar.training.loss_term("cross_entropy", smoothing=0.1),
        )
    message = str(caught.value)
    for part in ("trainable[0]", "layer4", "optimizer.options.beta", "gradient_edits[0]", "losses[0]"):
        assert part in message
    assert client.trainers() == []


def test_what_is_wrong_with_a_batch_leaves_the_trainer_as_it_was(client: trocar.Client) -> None:
    trainer, (images, labels) = make_trainer(client, ("layer4", "fc")), batches(1)[0]
    with pytest.raises(trocar.errors.TargetRejectedError, match="10"):
        trainer.step(images, labels + 10)
    with pytest.raises(trocar.errors.TargetRejectedError):
        trainer.step(images, labels[:3])
    with pytest.raises(trocar.errors.InputRejectedError):
        trainer.step(images[:, :1], labels)
    bad = images.copy()
    bad[0, 0, 0, 0] = np.nan
    with pytest.raises(trocar.errors.NonFiniteStepError):
        trainer.step(bad, labels)
    expected = trained_plainly(("layer4", "fc"), 1)
    trainer.step(images, labels)
    found = trainer.extract(None, taps="layer4.0.bn1/param(running_mean)")
    (mean,) = found.values()
    assert np.array_equal(mean, expected.layer4[0].bn1.running_mean.numpy())


def test_closing_twice_is_closing(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    trainer.close()
    trainer.close()
    with pytest.raises(trocar.errors.UnknownTrainerError):
        trainer.info()


def test_gradients_that_wait_can_be_read(client: trocar.Client) -> None:
    trainer, (images, labels) = make_trainer(client, ("layer4", "fc")), batches(1)[0]
    assert trainer.parameter_gradients() == {}
    trainer.forward_backward(images, labels)
    found = trainer.parameter_gradients()
    assert sorted(found) == sorted(trainer.info().trainable)
    assert np.abs(found["fc.bias"]).max() <= np.float32(0.1)
    model = with_head(base_model())
    model.train()
    for path, module in model.named_modules():
        module.training = path == "" or path.startswith("layer4")
    cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
    assert model.fc.bias.grad is not None
    assert np.array_equal(found["fc.bias"], model.fc.bias.grad.clamp(-0.1, 0.1).numpy())
    trainer.optimizer_step()
    assert trainer.parameter_gradients() == {}


def test_a_file_that_is_exported_over_a_private_one_stays_private(
    client: trocar.Client, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with make_trainer(client, ("fc",)) as trainer:
        trainer.export(path)
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        trainer.export(path)
        assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.glob("*weights.safetensors*")) == [path]
