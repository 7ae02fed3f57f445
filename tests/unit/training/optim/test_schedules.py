"""Rates over time against torch's own schedulers, number for number."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.checks.schedule_checks import schedule_problems
from trocar_server.training.optim.schedules import Schedule
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import OptimizerSpec, ScheduleSpec

SGD = OptimizerSpec(name="sgd", options={"lr": 0.1, "momentum": 0.9})


def _optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(1))]},
        {"params": [nn.Parameter(torch.ones(1))], "lr": 0.02},
    ]
    return kind(groups, **{"lr": 0.1, **options})


def _step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(1)
    optimizer.step()


def _numbers(optimizer: torch.optim.Optimizer) -> list[Any]:
    keys = ("lr", "momentum", "betas")
    return [[group.get(key) for key in keys] for group in optimizer.param_groups]


def _rates_by_hand(make: Callable[[Any], LRScheduler], steps: int, **options: Any) -> list[Any]:
    optimizer = _optimizer(**options)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(_numbers(optimizer))
        _step(optimizer)
        scheduler.step()
    return found


def _rates(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
    found = []
    for _ in range(steps):
        found.append(_numbers(optimizer))
        _step(optimizer)
        schedule.advance("step")
    return found


def _warm(optimizer: Any, main: LRScheduler) -> SequentialLR:
    warm = LinearLR(optimizer, start_factor=0.01, total_iters=4)
    return SequentialLR(optimizer, [warm, main], [4])


CASES: list[tuple[dict[str, Any], Callable[[Any], LRScheduler]]] = [
    ({"name": "constant"}, lambda o: LinearLR(o, start_factor=1.0, total_iters=1)),
    (
        {"name": "constant", "warmup": 4, "warmup_start": 0.2},
        lambda o: LinearLR(o, start_factor=0.2, total_iters=4),
    ),
    ({"name": "step", "options": {"step_size": 3, "gamma": 0.5}}, lambda o: StepLR(o, 3, 0.5)),
    ({"name": "step", "options": {"step_size": 3}, "warmup": 4}, lambda o: _warm(o, StepLR(o, 3))),
    (
        {"name": "cosine", "options": {"T_max": 10, "eta_min": 0.001}},
        lambda o: CosineAnnealingLR(o, 10, 0.001),
    ),
    ({"name": "cosine", "warmup": 4}, lambda o: _warm(o, CosineAnnealingLR(o, 8))),
    (
        {"name": "one_cycle", "options": {"max_lr": [0.5, 0.1], "pct_start": 0.5, "three_phase": True}},
        lambda o: OneCycleLR(o, [0.5, 0.1], 12, pct_start=0.5, three_phase=True),
    ),
    (
        {"name": "one_cycle", "options": {"max_lr": 0.5, "epochs": 3, "steps_per_epoch": 4}},
        lambda o: OneCycleLR(o, 0.5, epochs=3, steps_per_epoch=4),
    ),
]


@pytest.mark.parametrize(("fields", "by_hand"), CASES)
def test_rates_are_those_of_torch(fields: dict[str, Any], by_hand: Callable[[Any], LRScheduler]) -> None:
    optimizer = _optimizer(momentum=0.9)
    schedule = Schedule(ScheduleSpec(**fields), optimizer)
    schedule.expect(total_steps=12)
    schedule.check_ready()
    assert _rates(schedule, optimizer, 12) == _rates_by_hand(by_hand, 12, momentum=0.9)


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 9])
@pytest.mark.parametrize(("fields", "by_hand"), CASES)
def test_a_schedule_goes_on_from_its_state_as_if_nothing_had_been(
    fields: dict[str, Any], by_hand: Callable[[Any], LRScheduler], stop: int
) -> None:
    first = _optimizer(momentum=0.9)
    schedule = Schedule(ScheduleSpec(**fields), first)
    schedule.expect(total_steps=12)
    before = _rates(schedule, first, stop)
    state = json.loads(json.dumps(schedule.state(), allow_nan=False))

    second = _optimizer(momentum=0.9)
    other = Schedule(ScheduleSpec(**fields), second)
    other.load(state)
    other.expect(total_steps=12)  # a fit that is resumed says so again
    assert other.state() == schedule.state()
    assert before + _rates(other, second, 12 - stop) == _rates_by_hand(by_hand, 12, momentum=0.9)


def test_a_state_that_was_taken_is_not_changed_by_steps() -> None:
    optimizer = _optimizer()
    schedule = Schedule(ScheduleSpec(name="step", options={"step_size": 1}, warmup=2), optimizer)
    state = schedule.state()
    text = json.dumps(state)
    _rates(schedule, optimizer, 3)
    assert json.dumps(state) == text


def test_epochs_are_counted_apart_from_steps() -> None:
    optimizer = _optimizer()
    schedule = Schedule(ScheduleSpec(name="step", options={"step_size": 2}, per="epoch"), optimizer)
    seen = []
    for _ in range(4):
        schedule.advance("step")
        schedule.advance("step")
        seen.append(schedule.rates[0])
        schedule.advance("epoch")
    assert seen == [0.1, 0.1, pytest.approx(0.01), pytest.approx(0.01)]
    assert schedule.count == 4


def test_a_plateau_follows_evaluations_and_goes_on_from_its_state() -> None:
    values = [1.0, 0.9, 0.95, 0.96, 0.97, 0.5, float("inf"), 0.6, 0.7]
    options: dict[str, Any] = {"patience": 1, "factor": 0.5, "cooldown": 1}
    by_hand = _optimizer()
    plateau = ReduceLROnPlateau(by_hand, patience=1, factor=0.5, cooldown=1)
    mine = _optimizer()
    spec = ScheduleSpec(name="plateau", options=options)
    schedule = Schedule(spec, mine)
    for value in values:
        state = json.loads(json.dumps(schedule.state(), allow_nan=False))
        schedule = Schedule(spec, mine)
        schedule.load(state)
        plateau.step(value)
        schedule.after_evaluation(value)
        assert _numbers(mine) == _numbers(by_hand)
    assert schedule.evaluation_count == len(values)


def test_a_plateau_can_have_a_warm_up_of_steps() -> None:
    optimizer = _optimizer()
    schedule = Schedule(
        ScheduleSpec(name="plateau", options={"patience": 0, "factor": 0.5}, warmup=4, warmup_start=0.5),
        optimizer,
    )
    rates = [numbers[0][0] for numbers in _rates(schedule, optimizer, 5)]
    assert rates == pytest.approx([0.05, 0.0625, 0.075, 0.0875, 0.1])
    for value in (1.0, 2.0):
        schedule.after_evaluation(value)
    assert schedule.rates[0] == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["cosine", "one_cycle"])
def test_a_schedule_without_its_length_is_refused_before_a_step(name: Any) -> None:
    optimizer = _optimizer(momentum=0.9)
    options: dict[str, Any] = {"max_lr": 0.1} if name == "one_cycle" else {}
    schedule = Schedule(ScheduleSpec(name=name, options=options), optimizer)
    with pytest.raises(ServiceError, match="needs its length") as caught:
        schedule.check_ready()
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    schedule.expect(total_steps=5)
    schedule.check_ready()


def test_a_length_in_the_options_goes_before_that_of_a_fit() -> None:
    optimizer = _optimizer()
    schedule = Schedule(ScheduleSpec(name="cosine", options={"T_max": 4}), optimizer)
    schedule.expect(total_steps=1000)
    rates = _rates(schedule, optimizer, 6)
    assert rates == _rates_by_hand(lambda o: CosineAnnealingLR(o, 4), 6)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_behind_its_end_a_cycle_stays_at_its_last_rate(strategy: Any) -> None:
    """torch's own goes on by one step: to a rate below zero, or up again."""
    optimizer = _optimizer(momentum=0.9)
    options = {"max_lr": 0.1, "total_steps": 10, "anneal_strategy": strategy}
    schedule = Schedule(ScheduleSpec(name="one_cycle", options=options), optimizer)
    expected = _rates_by_hand(lambda o: OneCycleLR(o, **options), 10, momentum=0.9)
    assert _rates(schedule, optimizer, 15) == expected + expected[-1:] * 5
    assert min(schedule.rates) >= 0


def test_the_optimizer_itself_need_not_step() -> None:
    """Where weights are updated in the backward pass; torch would warn, and warnings are errors here."""
    schedule = Schedule(ScheduleSpec(name="step", options={"step_size": 1}), _optimizer())
    schedule.advance("step")
    assert schedule.rates[0] == pytest.approx(0.01)


def _problems(fields: dict[str, Any], optimizer: OptimizerSpec = SGD, group_count: int = 1) -> list[str]:
    problems = Problems()
    schedule_problems(ScheduleSpec(**fields), optimizer, group_count, problems)
    return problems.lines


@pytest.mark.parametrize(("fields", "by_hand"), CASES)
def test_a_schedule_that_works_has_no_problems(fields: dict[str, Any], by_hand: object) -> None:
    assert _problems(fields, group_count=2) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "step"}, "schedule.options.step_size: step needs it"),
        (
            {"name": "step", "options": {"step_size": 0}},
            "schedule.options.step_size: must be a whole number from 1",
        ),
        ({"name": "step", "options": {"step_size": 2.5}}, "must be a whole number from 1"),
        ({"name": "step", "options": {"step_size": 2, "gama": 1}}, "step has no such option; nearest: gamma"),
        (
            {"name": "step", "options": {"step_size": 2, "gamma": float("nan")}},
            "gamma: must be a finite number",
        ),
        ({"name": "constant", "options": {"factor": 1}}, "constant has no such option; it has none"),
        ({"name": "cosine", "options": {"T_max": 0}}, "T_max: must be a whole number from 1"),
        ({"name": "cosine", "options": {"last_epoch": 3}}, "no such option"),
        ({"name": "one_cycle"}, "schedule.options.max_lr: one_cycle needs it"),
        ({"name": "one_cycle", "options": {"max_lr": [0.1, 0.2, 0.3]}}, "or a list of 1, one for each"),
        (
            {"name": "one_cycle", "options": {"max_lr": 0.1, "pct_start": 1.0}},
            "pct_start: must be a number from 0",
        ),
        (
            {"name": "one_cycle", "options": {"max_lr": 0.1, "div_factor": 0}},
            "div_factor: must be a positive",
        ),
        ({"name": "one_cycle", "options": {"max_lr": 0.1, "anneal_strategy": "sin"}}, "one of cos, linear"),
        ({"name": "plateau", "options": {"mode": "low"}}, "mode: must be one of min, max"),
        ({"name": "plateau", "options": {"factor": 1.5}}, "PyTorch rejects them: Factor should be < 1.0"),
        ({"name": "plateau", "options": {"patience": -1}}, "patience: must be a whole number from 0"),
    ],
)
def test_wrong_options_are_problems(fields: dict[str, Any], message: str) -> None:
    (line,) = _problems(fields)
    assert message in line


@pytest.mark.parametrize("share", [0, 0.01, 0.1])
def test_a_cycle_may_begin_at_its_peak_and_after_a_step_of_a_hundred(share: float) -> None:
    fields: dict[str, Any] = {"name": "one_cycle", "options": {"max_lr": 0.5, "pct_start": share}}
    assert _problems(fields) == []
    optimizer = _optimizer(momentum=0.9)
    schedule = Schedule(ScheduleSpec(**fields), optimizer)
    schedule.expect(total_steps=30)
    expected = _rates_by_hand(lambda o: OneCycleLR(o, 0.5, 30, pct_start=float(share)), 30, momentum=0.9)
    assert _rates(schedule, optimizer, 30) == expected


def test_a_length_that_torch_refuses_leaves_the_schedule_as_it_was() -> None:
    optimizer = _optimizer(momentum=0.9)
    fields: dict[str, Any] = {"name": "one_cycle", "options": {"max_lr": 0.5, "pct_start": 0.1}}
    schedule = Schedule(ScheduleSpec(**fields), optimizer)
    for earlier in (None, 20):
        schedule.expect(total_steps=earlier)
        before = schedule.state()
        with pytest.raises(ServiceError, match=r"pct_start.*10 updates") as failure:
            schedule.expect(total_steps=10)
        assert failure.value.reason is ErrorReason.FIT_INVALID
        assert schedule.state() == before


def test_a_cycle_of_momentum_needs_an_optimizer_that_has_one() -> None:
    adagrad = OptimizerSpec(name="adagrad", options={"lr": 0.1})
    fields = {"name": "one_cycle", "options": {"max_lr": 0.1}}
    assert "must support momentum" in _problems(fields, adagrad)[0]
    assert (
        _problems({"name": "one_cycle", "options": {"max_lr": 0.1, "cycle_momentum": False}}, adagrad) == []
    )
    assert _problems(fields, OptimizerSpec(name="adamw", options={"lr": 0.1})) == []


def test_a_cycle_of_betas_goes_on_from_its_state() -> None:
    spec = ScheduleSpec(name="one_cycle", options={"max_lr": 0.1, "total_steps": 8})

    def by_hand(steps: int) -> list[Any]:
        optimizer = _optimizer(torch.optim.AdamW)
        scheduler = OneCycleLR(optimizer, 0.1, 8)
        found = []
        for _ in range(steps):
            found.append(_numbers(optimizer))
            _step(optimizer)
            scheduler.step()
        return found

    first = _optimizer(torch.optim.AdamW)
    schedule = Schedule(spec, first)
    before = _rates(schedule, first, 3)
    second = _optimizer(torch.optim.AdamW)
    other = Schedule(spec, second)
    other.load(json.loads(json.dumps(schedule.state())))
    assert before + _rates(other, second, 5) == by_hand(8)


UNMADE: list[tuple[dict[str, Any], Callable[[Any], LRScheduler]]] = [
    ({"name": "cosine"}, lambda o: CosineAnnealingLR(o, 5)),
    ({"name": "cosine", "warmup": 4}, lambda o: _warm(o, CosineAnnealingLR(o, 1))),
    ({"name": "one_cycle", "options": {"max_lr": [0.5, 0.1]}}, lambda o: OneCycleLR(o, [0.5, 0.1], 5)),
]


@pytest.mark.parametrize("stop", [0, 7, 12])
@pytest.mark.parametrize(("fields", "by_hand"), UNMADE)
def test_a_state_without_a_length_takes_a_schedule_back_to_before_it_had_one(
    fields: dict[str, Any], by_hand: Callable[[Any], LRScheduler], stop: int
) -> None:
    spec = ScheduleSpec(**fields)
    optimizer = _optimizer(momentum=0.9)
    schedule = Schedule(spec, optimizer)
    before = json.loads(json.dumps(schedule.state()))
    schedule.expect(total_steps=12)
    _rates(schedule, optimizer, stop)

    schedule.load(before)
    assert not schedule.is_made
    assert schedule.state() == before
    other = Schedule(spec, _optimizer(momentum=0.9))
    other.load(schedule.state())
    assert not other.is_made
    schedule.expect(total_steps=5)
    assert _rates(schedule, optimizer, 5) == _rates_by_hand(by_hand, 5, momentum=0.9)


@pytest.mark.parametrize(("fields", "by_hand"), UNMADE)
def test_until_a_step_is_counted_the_last_length_holds(
    fields: dict[str, Any], by_hand: Callable[[Any], LRScheduler]
) -> None:
    optimizer = _optimizer(momentum=0.9)
    schedule = Schedule(ScheduleSpec(**fields), optimizer)
    schedule.expect(total_steps=12)
    schedule.expect(total_steps=5)
    found = _rates(schedule, optimizer, 3)
    schedule.expect(total_steps=100)
    assert found + _rates(schedule, optimizer, 2) == _rates_by_hand(by_hand, 5, momentum=0.9)
