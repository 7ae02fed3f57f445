import itertools
import json
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from tests.unit.training.fits import (
    ArrayReader,
    Checkpoints,
    dataset,
    fit_of,
    run_fit,
    shown_core,
    steps_of,
)
from tests.unit.training.trainers import TinyNet, assert_same, tiny
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.surgery.guard import PassAborted
from trocar_server.training.datasets.order import random_numbers
from trocar_server.training.fit import fit as fit_module
from trocar_server.training.fit.fit_state import FitState
from trocar_server.training.step.core import TrainerCore

HEAD: dict[str, Any] = {
    "trainable": ["fc"],
    "optimizer": {"name": "sgd", "options": {"lr": 0.1, "momentum": 0.9}},
}
LAST: dict[str, Any] = {"trainable": ["block", "fc"], "optimizer": {"name": "adam", "options": {"lr": 0.01}}}
WHOLE: dict[str, Any] = {"optimizer": {"name": "sgd", "options": {"lr": 0.1}}}


def plain_torch(
    base: HostedModel,
    trainer: dict[str, Any],
    data: ArrayReader,
    epochs: int,
    batch_size: int,
    augment: Any = None,
) -> nn.Module:
    """The same fit as anyone would write it: modes, frozen weights, order, seeds."""
    model = TinyNet()
    model.load_state_dict(base.module.state_dict())
    parts = trainer.get("trainable", ["stem", "block", "fc"])
    model.eval().requires_grad_(False)
    model.training = model.drop.training = model.pool.training = True
    for part in parts:
        model.get_submodule(part).train().requires_grad_(True)
    options = dict(trainer["optimizer"]["options"])
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[trainer["optimizer"]["name"]]
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    torch.manual_seed(0)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(batch_size):
            images = data.images[indices]
            if augment:
                images = torch.stack(
                    [seeded(augment, epoch, int(i), x) for i, x in zip(indices, images, strict=True)]
                )
            nn.functional.cross_entropy(model(images), data.targets[indices]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def seeded(augment: Any, epoch: int, index: int, image: Tensor) -> Tensor:
    with random_numbers(1000 * epoch + index):
        result: Tensor = augment(image)
        return result


@pytest.fixture
def base() -> HostedModel:
    return tiny(TinyNet)


@pytest.mark.parametrize("trainer", [HEAD, LAST, WHOLE], ids=["head", "last", "whole"])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_weights_are_those_of_the_same_loop_in_plain_torch(
    base: HostedModel, trainer: dict[str, Any], mode: str
) -> None:
    data = dataset(22)
    core = shown_core(base, **trainer)

    with torch.random.fork_rng():
        expected = plain_torch(base, trainer, data, epochs=3, batch_size=4)
    fit = fit_of(core, data, epochs=3, batch_size=4, feature_cache={"mode": mode})
    run_fit(fit)

    assert ("training" in fit.cache_refusals) is (mode == "off" or trainer is WHOLE)
    assert_same(core.module, expected)


def test_augmented_fit_is_that_of_plain_torch(base: HostedModel) -> None:
    data = dataset(10)
    core = shown_core(base, **HEAD)
    augment = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomCrop(8, padding=2)])
    specs = [
        {"name": "RandomHorizontalFlip", "options": {"p": 0.5}},
        {"name": "RandomCrop", "options": {"size": 8, "padding": 2}},
    ]

    with torch.random.fork_rng():
        expected = plain_torch(base, HEAD, data, epochs=2, batch_size=4, augment=augment)
    fit = fit_of(core, data, epochs=2, batch_size=4, augmentations=specs)
    run_fit(fit)

    assert "augmentations are random" in fit.cache_refusals["training"]
    assert_same(core.module, expected)


@pytest.mark.parametrize("trainer", [HEAD, WHOLE], ids=["head", "whole"])
@pytest.mark.parametrize("stop", [1, 4, 7, 12, 13])
def test_a_fit_that_goes_on_in_another_process_ends_the_same(
    base: HostedModel, trainer: dict[str, Any], stop: int
) -> None:
    fields: dict[str, Any] = {
        **trainer,
        "accumulation": 2,
        "ema_decay": 0.9,
        "schedule": {"name": "cosine", "warmup": 2},
        "gradient_edits": [{"selector": "fc", "name": "clamp", "options": {"low": -0.1, "high": 0.1}}],
    }
    train, evaluation = dataset(22), dataset(10, seed=2)
    settings: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 5,
        "augmentations": [] if trainer is HEAD else [FLIP],
    }
    unbroken = shown_core(base, **fields)
    whole = fit_of(unbroken, train, evaluation, **settings)
    run_fit(whole)

    first = shown_core(base, **fields)
    fit = fit_of(first, train, evaluation, **settings)
    steps_of(fit, stop)
    text, weights = json.dumps(fit.state().to_json()), first.state()
    second = shown_core(base, **fields)
    second.load_state(weights)
    resumed = fit_of(second, train, evaluation, state=FitState.from_json(json.loads(text)), **settings)
    run_fit(resumed)

    assert_same(second.module, unbroken.module)
    assert_same(second.hosted.module, unbroken.hosted.module)
    assert json.dumps(resumed.state().to_json()["history"]) == json.dumps(whole.state().to_json()["history"])


FLIP = {"name": "RandomHorizontalFlip", "options": {"p": 0.5}}


def test_every_checkpoint_leads_to_the_same_end(base: HostedModel) -> None:
    train, evaluation = dataset(12), dataset(10, seed=2)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, "checkpoint_every": 2}
    core = shown_core(base, **WHOLE)
    kept = Checkpoints(core)
    events = run_fit(fit_of(core, train, evaluation, checkpoint=kept, **settings))

    assert [event.checkpoint for event in events if event.kind == "checkpoint"] == [1, 2, 3, 4]
    for text, weights in kept.saved:
        other = shown_core(base, **WHOLE)
        other.load_state(weights)
        state = FitState.from_json(json.loads(text))
        later = run_fit(fit_of(other, train, evaluation, state=state, **settings))
        assert_same(other.module, core.module)
        assert later[0].number == state.event
        assert later[-1].kind == "finished"


def test_events_are_numbered_without_a_gap_and_tell_what_happened(
    base: HostedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0)  # every batch takes one
    monkeypatch.setattr(
        fit_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds), time=time.time)
    )
    core = shown_core(base, **HEAD)
    fit = fit_of(core, dataset(20), dataset(10, seed=2), epochs=2, batch_size=8)
    events = run_fit(fit)

    assert [event.number for event in events] == list(range(len(events)))
    kinds = [event.kind for event in events if event.kind != "cache"]
    epoch = ["step", "step", "step", "epoch", "evaluation", "checkpoint"]
    assert kinds == ["checkpoint", *epoch, *epoch, "finished"]
    steps = [event for event in events if event.kind == "step"]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert [event.sample_count for event in steps] == [8, 8, 4, 8, 8, 4]
    assert all(event.gradient_norm and event.samples_per_s and event.memory_bytes for event in steps)
    assert steps[-1].seconds_left is not None
    assert steps[-1].seconds_left < steps[0].seconds_left  # type: ignore[operator]
    json.dumps([event.to_json() for event in events], allow_nan=False)


def test_loss_of_an_epoch_is_the_mean_over_its_samples(base: HostedModel) -> None:
    events = run_fit(fit_of(shown_core(base, **HEAD), dataset(11), epochs=1, batch_size=4))
    steps = [event for event in events if event.kind == "step"]
    (epoch,) = [event for event in events if event.kind == "epoch"]

    expected = sum((step.loss or 0.0) * (step.sample_count or 0) for step in steps) / 11
    assert epoch.loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_evaluation_is_that_of_the_model_in_eval_mode(base: HostedModel, mode: str) -> None:
    evaluation = dataset(11, seed=2)
    core = shown_core(base, ema_decay=0.5, **HEAD)
    fit = fit_of(core, dataset(10), evaluation, epochs=2, batch_size=4, feature_cache={"mode": mode})
    told = [event for event in run_fit(fit) if event.kind == "evaluation"][-1]

    with torch.no_grad():
        output = core.hosted.module(evaluation.images)
    loss = nn.functional.cross_entropy(output, evaluation.targets)
    assert told.loss == pytest.approx(float(loss), rel=1e-6)
    right = (output.argmax(1) == evaluation.targets).float().mean()
    assert told.metrics is not None
    assert told.metrics["accuracy"] == pytest.approx(float(right), rel=1e-6)


def test_cached_evaluation_tells_the_same_bits(base: HostedModel) -> None:
    told = []
    for mode in ("auto", "off"):
        fit = fit_of(
            shown_core(base, **LAST),
            dataset(10),
            dataset(11, seed=2),
            epochs=3,
            batch_size=4,
            feature_cache={"mode": mode},
        )
        run_fit(fit)
        assert ("evaluation" in fit.cache_refusals) is (mode == "off")
        told.append(fit.state().history)
    assert told[0] == told[1]


def test_cached_epochs_load_no_sample(base: HostedModel) -> None:
    train, evaluation = dataset(12), dataset(10, seed=2)
    fit = fit_of(shown_core(base, **HEAD), train, evaluation, epochs=5, batch_size=4)
    steps_of(fit, 1)
    loaded = train.loaded_count, evaluation.loaded_count
    run_fit(fit)

    assert fit.cache_refusals == {}
    assert (train.loaded_count, evaluation.loaded_count) == loaded


def test_early_stop_ends_after_its_patience(base: HostedModel) -> None:
    core = shown_core(base, trainable=["fc"], optimizer={"name": "sgd", "options": {"lr": 1e-12}})
    stop = {"metric": "accuracy", "patience": 2, "is_higher_better": True, "min_delta": 0.5}
    fit = fit_of(core, dataset(10), dataset(10, seed=2), epochs=9, batch_size=5, early_stop=stop)
    events = run_fit(fit)

    judged = [event.is_best for event in events if event.kind == "evaluation"]
    assert judged == [True, False, False]
    assert "2 evaluations" in (events[-1].message or "")


def test_a_unit_that_fails_changes_nothing_and_is_tried_again(base: HostedModel) -> None:
    data = dataset(12)
    core, other = shown_core(base, **HEAD), shown_core(base, **HEAD)
    fit = fit_of(core, data, epochs=3, batch_size=4)
    for count in range(1, 40):
        guard = PassGuard()
        guard.cancel()
        before = fit.state()
        if fit.is_over:
            break
        with suppress(PassAborted, ServiceError):
            fit.advance(guard)
            continue
        assert fit.state() == before
        steps_of(fit, before.step + 1)
        assert count < 39
    run_fit(fit_of(other, data, epochs=3, batch_size=4))
    assert_same(core.module, other.module)


def test_failed_checkpoint_is_made_again_and_no_step_twice(base: HostedModel) -> None:
    core, other = shown_core(base, **HEAD), shown_core(base, **HEAD)
    data, kept, calls = dataset(12), Checkpoints(core), []

    def sometimes(state: FitState) -> int:
        calls.append(state)
        if len(calls) % 2:
            raise ServiceError(ErrorReason.STORAGE_FULL, "the disk is full")
        return kept(state)

    fit = fit_of(core, data, epochs=2, batch_size=4, checkpoint=sometimes)
    failures = 0
    while not fit.is_over:
        failures += 1
        with suppress(ServiceError):
            fit.advance(PassGuard())
            failures -= 1
    run_fit(fit_of(other, data, epochs=2, batch_size=4))

    assert failures == len(kept.saved) == 3
    assert_same(core.module, other.module)


def test_one_cycle_is_as_long_as_the_fit(base: HostedModel) -> None:
    core = shown_core(
        base, trainable=["fc"], schedule={"name": "one_cycle", "options": {"max_lr": 0.5}}, accumulation=2
    )
    events = run_fit(fit_of(core, dataset(12), epochs=4, batch_size=4))
    rates = [event.learning_rates[0] for event in events if event.kind == "step"]  # type: ignore[index]

    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
    expected = []
    for _ in range(6):
        expected += [optimizer.param_groups[0]["lr"]] * 2
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected[: len(rates)], rel=1e-9)


@pytest.mark.parametrize("count", [7, 8, 9])
def test_steps_of_several_workers_are_counted_with_the_samples_that_fill_up_an_epoch(
    base: HostedModel, count: int
) -> None:
    core = shown_core(base, **HEAD, schedule={"name": "cosine"})
    fit = fit_of(core, dataset(count), epochs=2, batch_size=4, workers=2, drop_last=True)
    steps = [event for event in run_fit(fit) if event.kind == "step"]

    assert fit.step_total == len(steps) == 4
    assert [event.seconds_left == 0 for event in steps] == [False, False, False, True]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for event in steps:
        assert event.learning_rates == (optimizer.param_groups[0]["lr"],)
        optimizer.step()
        schedule.step()


def test_a_batch_that_is_full_only_with_the_samples_that_fill_up_an_epoch(base: HostedModel) -> None:
    fit = fit_of(shown_core(base, **HEAD), dataset(7), batch_size=8, workers=2, drop_last=True, epochs=1)
    assert fit.step_total == [event.kind for event in run_fit(fit)].count("step") == 1


def test_a_fit_that_ended_before_its_first_update_does_not_determine_the_next_length(
    base: HostedModel,
) -> None:
    core = shown_core(base, **HEAD, schedule={"name": "cosine"})
    fit_of(core, dataset(12), epochs=50, batch_size=4)
    steps = [e for e in run_fit(fit_of(core, dataset(12), epochs=2, batch_size=4)) if e.kind == "step"]

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for event in steps:
        assert event.learning_rates == (optimizer.param_groups[0]["lr"],)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    "schedule", [{"name": "cosine", "warmup": 2}, {"name": "one_cycle", "options": {"max_lr": 0.5}}]
)
def test_a_fit_behind_a_state_without_a_length_is_that_of_a_new_trainer(
    base: HostedModel, schedule: dict[str, Any]
) -> None:
    core, other = (shown_core(base, **HEAD, schedule=schedule) for _ in range(2))
    before = core.state()
    run_fit(fit_of(core, dataset(12), epochs=2, batch_size=4))
    core.load_state(before)
    for one in (core, other):
        run_fit(fit_of(one, dataset(12), epochs=3, batch_size=4))
    assert_same(core.module, other.module)
    assert core.state().facts == other.state().facts


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_end_of_a_fit_is_saved_with_what_followed_its_last_update(base: HostedModel, epochs: int) -> None:
    """Accumulated gradients, statistics of batch norm and random numbers."""
    core = shown_core(base, **WHOLE, accumulation=2)
    kept = Checkpoints(core)
    run_fit(
        fit_of(core, dataset(20), epochs=epochs, batch_size=4, checkpoint=kept, checkpoint_every=1)
    )  # 5 batches an epoch

    assert_saved(kept, core)


def test_the_end_of_a_fit_is_saved_with_what_its_last_evaluation_changed(base: HostedModel) -> None:
    plateau = {"name": "plateau", "options": {"patience": 0}}
    core = shown_core(base, **HEAD, schedule=plateau)
    kept = Checkpoints(core)
    run_fit(
        fit_of(core, dataset(20), dataset(5), batch_size=4, epochs=1, checkpoint=kept, checkpoint_every=1)
    )

    assert_saved(kept, core)


def test_a_fit_that_ends_with_a_checkpoint_does_not_save_twice(base: HostedModel) -> None:
    core = shown_core(base, **HEAD)
    kept = Checkpoints(core)
    run_fit(fit_of(core, dataset(20), batch_size=4, epochs=1, checkpoint=kept, checkpoint_every=5))
    assert len(kept.saved) == 2  # before the first step, and behind the last


def assert_saved(kept: Checkpoints, core: TrainerCore) -> None:
    """Compare the newest checkpoint with the trainer's state, bit by bit."""
    saved, state = kept.saved[-1][1], core.state()
    assert saved.facts == state.facts
    assert saved.tensors.keys() == state.tensors.keys()
    assert [name for name in saved.tensors if not torch.equal(saved.tensors[name], state.tensors[name])] == []


def test_skipped_steps_are_told_and_do_not_spoil_the_loss(base: HostedModel) -> None:
    data = dataset(12)
    data.images[3] = float("nan")
    core = shown_core(base, trainable=["fc"], on_nonfinite="skip")
    events = run_fit(fit_of(core, data, epochs=1, batch_size=4))

    assert [event.is_skipped for event in events if event.kind == "step"].count(True) == 1
    (epoch,) = [event for event in events if event.kind == "epoch"]
    assert epoch.loss is not None
    assert epoch.loss == epoch.loss
    assert epoch.sample_count == 8


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_batches_without_a_label_that_counts_are_left_out(base: HostedModel, mode: str) -> None:
    core, other = (shown_core(base, trainable=["fc"], on_nonfinite="skip") for _ in range(2))
    data, labelled = dataset(12), dataset(12)
    data.targets[8:] = -100
    labelled.images, labelled.targets = labelled.images[:8], labelled.targets[:8]
    fields: dict[str, Any] = {"epochs": 2, "batch_size": 4, "shuffle": False, "feature_cache": {"mode": mode}}
    events = run_fit(fit_of(core, data, data, **fields))
    expected = run_fit(fit_of(other, labelled, labelled, **fields))

    assert [event.is_skipped for event in events if event.kind == "step"] == [None, None, True] * 2
    for kind in ("epoch", "evaluation"):
        losses = [[event.loss for event in told if event.kind == kind] for told in (events, expected)]
        assert losses[0] == losses[1]


def test_a_batch_without_a_label_that_counts_fails_a_fit_that_skips_nothing(base: HostedModel) -> None:
    data = dataset(12)
    data.targets[8:] = -100
    fit = fit_of(shown_core(base, trainable=["fc"]), data, epochs=1, batch_size=4, shuffle=False)
    with pytest.raises(ServiceError, match=r"only labels equal to ignore_index.*'skip'") as failure:
        run_fit(fit)
    assert failure.value.reason is ErrorReason.TARGET_REJECTED


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_the_loss_of_a_sum_is_the_mean_over_the_samples(base: HostedModel, batch_size: int) -> None:
    term = {"name": "cross_entropy", "options": {"reduction": "sum"}}
    frozen = {"name": "sgd", "options": {"lr": 0.0}}
    core = shown_core(base, trainable=["fc"], losses=[term], optimizer=frozen)
    data = dataset(11)
    events = run_fit(fit_of(core, data, data, epochs=1, batch_size=batch_size))

    with torch.no_grad():
        expected = nn.functional.cross_entropy(core.hosted.module(data.images), data.targets)
    (evaluation,) = [event for event in events if event.kind == "evaluation"]
    (epoch,) = [event for event in events if event.kind == "epoch"]
    steps = [event.loss for event in events if event.kind == "step"]
    assert evaluation.loss == pytest.approx(float(expected), rel=1e-6)
    assert epoch.loss == pytest.approx(sum(steps) / 11, rel=1e-12)  # type: ignore[arg-type]


def test_a_cycle_that_has_no_room_in_the_fit_is_refused_with_its_option(base: HostedModel) -> None:
    schedule = {"name": "one_cycle", "options": {"max_lr": 0.5, "pct_start": 0.25}}
    core = shown_core(base, trainable=["fc"], schedule=schedule)
    for _ in range(2):  # the second time the schedule is as before, too
        with pytest.raises(ServiceError, match=r"pct_start.*4 updates") as failure:
            fit_of(core, dataset(16), epochs=1, batch_size=4)
        assert failure.value.reason is ErrorReason.FIT_INVALID
    assert len(run_fit(fit_of(core, dataset(16), epochs=2, batch_size=4))) > 8
