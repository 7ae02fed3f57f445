"""Phases of trainers and fits: the tables are whole, end where they should, and are documented."""

import ast
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import trocar_server
from trocar_server.training.phases import (
    FIT,
    FITS,
    HELD,
    PAUSED,
    STOPPING,
    TOLD,
    TRAINER,
    WAITING,
    Effect,
    FitPhase,
    FitSignal,
    FitsPhase,
    FitsSignal,
    Machine,
    TrainerPhase,
    TrainerSignal,
    as_markdown,
)

TABLES: Mapping[str, Any] = {"fit": FIT, "trainer": TRAINER, "fits": FITS}
KINDS: Mapping[str, tuple[type[StrEnum], type[StrEnum]]] = {
    "fit": (FitPhase, FitSignal),
    "trainer": (TrainerPhase, TrainerSignal),
    "fits": (FitsPhase, FitsSignal),
}
LAST = {FitPhase.OVER, TrainerPhase.CLOSED, FitsPhase.STOPPED}
FIRST = {"fit": FitPhase.RUNNING, "trainer": TrainerPhase.READY, "fits": FitsPhase.OPEN}
DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"


def reached(name: str, without: StrEnum | None = None) -> set[StrEnum]:
    """Return the phases to which signals lead from the first one."""
    table, found = TABLES[name], {FIRST[name]}
    while True:
        more = {table[key][0] for key in table if key[0] in found and key[1] is not without} - found
        if not more:
            return found
        found |= more


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_is_reached_and_has_an_answer_to_every_signal(name: str) -> None:
    phase, signal = KINDS[name]
    assert TABLES[name].keys() == {(one, other) for one in phase for other in signal}
    assert reached(name) == set(phase)


@pytest.mark.parametrize("name", TABLES)
def test_only_the_last_phase_is_never_left(name: str) -> None:
    stay = {
        phase
        for phase in reached(name)
        if {TABLES[name][k][0] for k in TABLES[name] if k[0] is phase} == {phase}
    }
    assert stay == LAST & stay
    assert len(stay) == 1


def test_what_a_user_asked_for_survives_a_drain_and_a_shutdown() -> None:
    for phase in FitPhase:
        for signal in (FitSignal.HOLD, FitSignal.RELEASE, FitSignal.STOP):
            following, effect = FIT[phase, signal]
            assert (following in PAUSED) == (phase in PAUSED)
            assert (following is FitPhase.CANCELLED) == (phase is FitPhase.CANCELLED)
            assert effect is not Effect.RECORD


def test_a_pause_is_recorded_where_it_changes_something_and_only_there() -> None:
    for phase in FitPhase:
        for signal in FitSignal:
            following, effect = FIT[phase, signal]
            is_asked = signal in (FitSignal.PAUSE, FitSignal.RESUME)
            assert (effect is Effect.RECORD) == (is_asked and (following in PAUSED) != (phase in PAUSED))


def test_a_cancellation_is_never_taken_back() -> None:
    for phase in (FitPhase.CANCELLED, FitPhase.OVER):
        assert {FIT[phase, signal][0] for signal in FitSignal if signal is not FitSignal.END} == {phase}


def test_a_fit_that_waits_is_paused_or_held() -> None:
    assert WAITING == (PAUSED | HELD) - STOPPING


def test_a_trainer_follows_its_fit() -> None:
    """Whatever order its signals come in, a trainer is paused exactly while its fit is."""
    fits: list[tuple[FitPhase, TrainerPhase]] = [(FitPhase.RUNNING, TrainerPhase.FITTING)]
    for fit, trainer in fits:
        for signal in FitSignal:
            following, effect = FIT[fit, signal]
            other = TRAINER[trainer, TOLD[signal]][0] if effect is Effect.RECORD else trainer
            if (following, other) not in fits:
                fits.append((following, other))
    assert all(
        (trainer is TrainerPhase.PAUSED) == (fit in PAUSED)
        for fit, trainer in fits
        if fit not in (FitPhase.CANCELLED, FitPhase.OVER)
    )


def test_a_machine_says_what_is_to_be_done() -> None:
    machine = Machine(FIT, FitPhase.RUNNING)
    assert [machine.send(FitSignal.PAUSE), machine.send(FitSignal.PAUSE)] == [Effect.RECORD, Effect.NOTHING]
    assert machine.phase is FitPhase.PAUSED
    closed = Machine(TRAINER, TrainerPhase.CLOSED)
    closed.send(TrainerSignal.END_FIT)
    assert closed.phase is TrainerPhase.CLOSED


def test_nothing_but_a_machine_writes_a_phase() -> None:
    writers = [
        path.name
        for path in Path(trocar_server.__file__).parent.joinpath("training").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "phase" and isinstance(node.ctx, ast.Store)
    ]
    assert writers == ["phases.py"] * 2


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_the_table(name: str) -> None:
    assert as_markdown(TABLES[name]) in DOCUMENT.read_text(encoding="utf-8")
