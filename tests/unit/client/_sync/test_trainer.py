"""A trainer's calls: their numbers, also after errors and at the same time; exports; watched fits."""

from __future__ import annotations

import asyncio
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct
from safetensors.numpy import load_file

import trocar
from tests.unit.client.fake_trainers import CONTENT, PIECE, TRAINER_ID, WEIGHTS, FakeTrainers, RefusedError
from trocar_api.v1 import fit_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGES, LABELS = np.zeros((4, 3, 2, 2), np.float32), [0, 1, 2, 3]


@pytest.fixture
def server() -> Iterator[FakeTrainers]:
    made = FakeTrainers()
    yield made
    made.stop()


@pytest.fixture
def client(server: FakeTrainers) -> Iterator[trocar.Client]:
    with trocar.connect(server.target) as connected:
        yield connected


@pytest.fixture
def trainer(client: trocar.Client) -> trocar.training.Trainer:
    return client.train("resnet18", head=10)


def fail_once(server: FakeTrainers, name: str, refused: RefusedError) -> None:
    """Let the next call of this name fail."""
    pending = [refused]

    def failing(called: str, _: Any) -> None:
        if called == name and pending:
            raise pending.pop()

    server.failing = failing


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def event(number: int, kind: str, **facts: Any) -> fit_pb2.FitEvent:
    told = Struct()
    told.update({"step": number, **facts})
    return fit_pb2.FitEvent(number=number, kind=kind, facts=told)


# --- Attempts ------------------------------------------------------------------------------------------


def test_a_busy_server_gets_the_batch_again_when_it_says(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    fail_once(
        server, "Train", RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER_BUSY", retry_after_s=0.3)
    )
    assert trainer.step(IMAGES, LABELS, timeout_s=5).loss == 1.0
    before, after = server.left_s[-2:]
    assert before - after >= 0.25  # gRPC rounds what it sends


def test_all_attempts_at_a_batch_share_one_deadline(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    pending = [RefusedError(grpc.StatusCode.UNAVAILABLE) for _ in range(2)]

    def failing(called: str, _: Any) -> None:
        if called == "Train" and pending:
            raise pending.pop()

    server.failing = failing
    trainer.step(IMAGES, LABELS, timeout_s=5)
    first, _, third = server.left_s[-3:]
    assert first - third >= 0.2  # after pauses of 0.1 and 0.2 s; gRPC rounds what it sends


# --- Numbers -------------------------------------------------------------------------------------------


def test_the_server_is_asked_for_the_first_number_only(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    for _ in range(3):
        trainer.step(IMAGES, LABELS)
    trainer.forward_backward(IMAGES, LABELS)
    trainer.optimizer_step()
    assert server.applied == [0, 1, 2, 3, 4]
    assert server.calls.count("GetTrainer") == 1


@pytest.mark.parametrize("is_older", [False, True])
def test_it_is_asked_within_the_time_of_the_call_and_waits_for_a_running_one(
    trainer: trocar.training.Trainer, server: FakeTrainers, is_older: bool
) -> None:
    server.is_older = is_older
    trainer.step(IMAGES, LABELS, timeout_s=5)
    trainer.optimizer_step(timeout_s=5)
    asked = ["GetTrainer", "ExportTrainer", "GetTrainer"] if is_older else ["GetTrainer"]
    assert server.calls == ["CreateTrainer", *asked, "Train", "StepOptimizer"]
    assert server.requests[1].waits_for_step
    assert max(server.left_s[1:]) < 6


@pytest.mark.parametrize(
    "refused",
    [
        RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "TARGET_REJECTED"),
        RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "NON_FINITE_STEP"),
        RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_after_an_error_the_server_is_asked_again(
    trainer: trocar.training.Trainer, server: FakeTrainers, refused: RefusedError
) -> None:
    trainer.step(IMAGES, LABELS)
    fail_once(server, "Train", refused)
    with pytest.raises(trocar.TrocarError):
        trainer.step(IMAGES, LABELS)
    trainer.step(IMAGES, LABELS)
    assert server.applied == [0, 1]
    assert server.calls.count("GetTrainer") == 2


def test_an_error_of_an_optimizer_step_is_no_other(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    fail_once(server, "StepOptimizer", RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "TRAINER_BROKEN"))
    with pytest.raises(trocar.errors.TrainerBrokenError):
        trainer.optimizer_step()
    trainer.optimizer_step()
    assert server.applied == [0]


def test_what_cannot_be_sent_takes_no_number(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    trainer.step(IMAGES, LABELS)
    with pytest.raises(TypeError, match="targets"):
        trainer.step(IMAGES, "cat")
    with pytest.raises(TypeError):
        trainer.step(object(), LABELS)  # type: ignore[arg-type]
    trainer.step(IMAGES, LABELS)
    assert server.applied == [0, 1]
    assert server.calls.count("GetTrainer") == 1


def test_a_broken_connection_sends_the_same_number_again(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    fail_once(server, "Train", RefusedError(grpc.StatusCode.UNAVAILABLE))
    assert trainer.step(IMAGES, LABELS).number == 0
    assert server.calls.count("Train") == 2
    assert server.applied == [0]


def test_a_number_of_ones_own_moves_the_following(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    trainer.step(IMAGES, LABELS)
    trainer.step(IMAGES, LABELS, number=1)
    trainer.step(IMAGES, LABELS)
    trainer.step(IMAGES, LABELS, number=1)  # sent once more
    trainer.step(IMAGES, LABELS)
    assert server.applied == [0, 1, 2, 1, 3]


def test_a_number_of_ones_own_does_not_ask(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    trainer.step(IMAGES, LABELS, number=0)
    assert "GetTrainer" not in server.calls
    trainer.step(IMAGES, LABELS)
    assert server.applied == [0, 1]


def test_after_a_restore_the_server_is_asked_again(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    trainer.step(IMAGES, LABELS)
    trainer.step(IMAGES, LABELS)
    trainer.restore()
    trainer.step(IMAGES, LABELS)
    assert server.applied == [0]


def test_threads_that_share_a_trainer_get_numbers_of_their_own(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    start = threading.Barrier(8)

    def work(_: int) -> None:
        start.wait()
        trainer.step(IMAGES, LABELS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sorted(server.applied) == list(range(8))
    assert server.calls.count("GetTrainer") == 1


def test_tasks_that_share_a_trainer_get_numbers_in_their_order(server: FakeTrainers) -> None:
    async def work() -> list[int | None]:
        async with trocar.aio.connect(server.target) as client:
            trainer = await client.train("resnet18", head=10)
            results = await asyncio.gather(*(trainer.step(IMAGES, LABELS) for _ in range(8)))
            return [result.number for result in results]

    assert asyncio.run(work()) == list(range(8))
    assert server.calls.count("GetTrainer") == 1


def test_who_asks_after_an_error_waits_for_calls_under_way(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    trainer.step(IMAGES, LABELS)
    slow_is_there, goes_on = threading.Event(), threading.Event()

    def failing(name: str, request: Any) -> None:
        if name == "Train" and request.number == 1:
            slow_is_there.set()
            assert goes_on.wait(10)
        if name == "Train" and request.number == 2 and not goes_on.is_set():
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "TARGET_REJECTED")

    server.failing = failing
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(trainer.step, IMAGES, LABELS)
        assert slow_is_there.wait(10)
        with pytest.raises(trocar.errors.TargetRejectedError):
            trainer.step(IMAGES, LABELS)
        after = pool.submit(trainer.step, IMAGES, LABELS)  # the server would say 1
        assert server.calls.count("GetTrainer") == 1
        goes_on.set()
        assert slow.result(10).number == 1
        assert after.result(10).number == 2
    assert server.applied == [0, 1, 2]


def test_an_evaluation_has_no_number(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    found = trainer.evaluate(IMAGES, LABELS)
    assert (found.loss, found.correct_count, found.accuracy) == (0.5, 3, 0.75)
    assert (server.applied, server.calls.count("GetTrainer")) == ([], 0)


def test_refused_gradients_tell_their_id(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    fail_once(server, "ExportTrainer", RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "TRAINER_BROKEN"))
    with pytest.raises(trocar.errors.TrainerBrokenError) as failure:
        trainer.parameter_gradients()
    assert failure.value.request_id == server.request_ids[-1]


# --- Life ----------------------------------------------------------------------------------------------


def test_somebody_elses_trainer_reads_as_absent(client: trocar.Client, server: FakeTrainers) -> None:
    fail_once(server, "GetTrainer", RefusedError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRAINER"))
    with pytest.raises(trocar.errors.UnknownTrainerError):
        client.trainer("b" * 32)
    assert client.trainer(TRAINER_ID).trainer_id == TRAINER_ID


def test_closing_what_is_closed_is_no_error(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    fail_once(server, "CloseTrainer", RefusedError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRAINER"))
    trainer.close()
    fail_once(server, "CloseTrainer", RefusedError(grpc.StatusCode.INTERNAL, "INTERNAL"))
    with pytest.raises(trocar.errors.InternalServerError):
        trainer.close()


def test_the_block_of_a_trainer_closes_it(client: trocar.Client, server: FakeTrainers) -> None:
    with client.train("resnet18", head=10) as trainer:
        assert repr(trainer) == f"Trainer('{TRAINER_ID}')"
    assert server.calls[-1] == "CloseTrainer"


def test_a_trainer_prints_what_it_trains(trainer: trocar.training.Trainer) -> None:
    assert str(trainer.info()).splitlines() == [
        f"trainer {TRAINER_ID}  ready",
        "  model     resnet18",
        "  trains    5,130 of 11,181,642 weights in 2 parameters",
        "  updates   0",
        "  memory    0.1 MB of its own",
    ]
    assert trainer.info().checkpoint_number is None


def test_a_notebook_shows_a_trainer_as_it_was_last_seen(client: trocar.Client, server: FakeTrainers) -> None:
    trainer = client.train("resnet18", head=10)
    asked = len(server.calls)
    assert "<th>model</th><td>resnet18</td>" in trainer._repr_html_()
    assert "resnet18" not in trocar.training.Trainer(client, TRAINER_ID)._repr_html_()
    assert len(server.calls) == asked


def test_a_gradient_norm_of_zero_is_no_missing_one(trainer: trocar.training.Trainer) -> None:
    assert trainer.step(IMAGES, LABELS).gradient_norm == 0.0


def test_unpublishing_names_the_model(client: trocar.Client, server: FakeTrainers) -> None:
    client.unpublish("flowers")
    assert server.requests[-1].model_id == "flowers"


# --- Exports -------------------------------------------------------------------------------------------


def test_an_export_is_the_file_and_nothing_beside_it(
    trainer: trocar.training.Trainer, tmp_path: Path
) -> None:
    path = trainer.export(str(tmp_path / "w.safetensors"))
    assert path.read_bytes() == CONTENT
    assert np.array_equal(load_file(path)["fc.weight"], WEIGHTS["fc.weight"])
    assert names_in(tmp_path) == ["w.safetensors"]


def test_an_export_that_breaks_is_taken_up_where_it_was(
    trainer: trocar.training.Trainer, server: FakeTrainers, tmp_path: Path
) -> None:
    server.pieces = [2, 0, 1]
    assert trainer.export(tmp_path / "w.safetensors").read_bytes() == CONTENT
    offsets = [request.offset_bytes for request in server.requests if hasattr(request, "offset_bytes")]
    assert offsets == [0, 2 * PIECE, 2 * PIECE, 3 * PIECE]


def test_an_export_of_weights_that_change_meanwhile_is_none(
    trainer: trocar.training.Trainer, server: FakeTrainers, tmp_path: Path
) -> None:
    (tmp_path / "w.safetensors").write_text("what was there before")
    server.pieces = [2]

    def failing(name: str, request: Any) -> None:
        if name == "ExportTrainer" and request.offset_bytes:
            server.update_count += 1

    server.failing = failing
    with pytest.raises(trocar.BadReplyError, match="the weights changed while they were exported"):
        trainer.export(tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_text() == "what was there before"
    assert names_in(tmp_path) == ["w.safetensors"]


def test_an_export_that_never_gets_through_leaves_nothing(server: FakeTrainers, tmp_path: Path) -> None:
    server.pieces = [0]
    with (
        trocar.connect(server.target, retries=0) as client,
        pytest.raises(trocar.errors.ServerUnavailableError),
    ):
        client.trainer(TRAINER_ID).export(tmp_path / "w.safetensors")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_leaves_no_file(
    trainer: trocar.training.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*(("os.fsync", full) if name == "fsync" else ("pathlib.Path.replace", full)))
    with pytest.raises(OSError, match="No space left"):
        trainer.export(tmp_path / "w.safetensors")
    assert names_in(tmp_path) == []


def test_a_file_that_cannot_be_made_is_named(
    trainer: trocar.training.Trainer, server: FakeTrainers, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        trainer.export(tmp_path / "no" / "w.safetensors")
    assert missing.value.filename == str(tmp_path / "no" / "w.safetensors")
    with pytest.raises(IsADirectoryError, match="give a file"):
        trainer.export(tmp_path)
    assert "ExportTrainer" not in server.calls


def test_an_error_of_the_server_ends_an_export_at_once(
    trainer: trocar.training.Trainer, server: FakeTrainers, tmp_path: Path
) -> None:
    fail_once(server, "ExportTrainer", RefusedError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_TRAINER"))
    with pytest.raises(trocar.errors.UnknownTrainerError):
        trainer.export(tmp_path / "w.safetensors")
    assert server.calls.count("ExportTrainer") == 1
    assert names_in(tmp_path) == []


# --- Fits ----------------------------------------------------------------------------------------------


def test_a_fit_is_watched_again_where_its_stream_ends_early(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    server.events = [event(0, "started", total_steps=4), *(event(n, "step", loss=n) for n in range(1, 5))]
    server.events.append(event(5, "finished"))
    server.events_per_call = 4
    history = trainer.wait(0, progress=False)
    assert [e.number for e in history] == list(range(6))
    assert history.losses == [1, 2, 3, 4]
    wanted = [r.event_number for r in server.requests if isinstance(r, fit_pb2.WatchFitRequest)]
    assert wanted == [0, 4]


def test_a_fit_of_many_days_is_watched_to_its_end(
    trainer: trocar.training.Trainer, server: FakeTrainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the call that watches it passes more often than a failed call is repeated."""
    monkeypatch.setattr("trocar._sync.fits._WATCH_TIMEOUT_S", 0.2)
    is_over = threading.Event()

    def failing(name: str, _: Any) -> None:
        if name == "WatchFit" and server.calls.count("WatchFit") < 7:
            is_over.wait(30)
        elif name == "WatchFit":
            is_over.set()

    server.failing = failing
    server.events = [event(0, "started"), event(1, "finished")]
    assert [e.kind for e in trainer.wait(0, progress=False)] == ["started", "finished"]


def test_a_fit_sends_its_data_and_calls_back(trainer: trocar.training.Trainer, server: FakeTrainers) -> None:
    server.events = [event(0, "started"), event(1, "step", loss=1), event(2, "finished")]
    seen: list[str] = []
    history = trainer.fit(
        (IMAGES, np.array(LABELS)), eval="0" * 32, on_event=lambda e: seen.append(e.kind), progress=False
    )
    assert seen == [e.kind for e in history] == ["started", "step", "finished"]
    (started,) = [r for r in server.requests if isinstance(r, fit_pb2.StartFitRequest)]
    assert (started.spec.dataset_id, started.spec.eval_dataset_id) == ("d" * 32, "0" * 32)


def test_an_upload_before_a_fit_is_reported(trainer: trocar.training.Trainer) -> None:
    told: list[trocar.UploadProgress] = []
    trainer.start_fit((IMAGES, np.array(LABELS)), on_upload=told.append)
    assert told[-1].read_count == 4
    assert told[-1].byte_count > IMAGES.nbytes


def test_a_wrong_option_is_refused_before_anything_is_uploaded(
    trainer: trocar.training.Trainer, server: FakeTrainers
) -> None:
    before = list(server.calls)
    with pytest.raises(TypeError, match="epochs"):
        trainer.fit((IMAGES, np.array(LABELS)), epochs=1.5)  # type: ignore[arg-type]
    with pytest.raises(trocar.errors.FitInvalidError, match="dataset"):
        trainer.fit(None)
    assert server.calls == before


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("NON_FINITE_STEP", trocar.errors.NonFiniteStepError),
        ("STORAGE_FULL", trocar.errors.StorageFullError),
        ("A_NEW_ONE", trocar.TrainerError),
    ],
)
def test_a_fit_that_fails_raises_its_reason(
    trainer: trocar.training.Trainer, server: FakeTrainers, reason: str, kind: type[Exception]
) -> None:
    server.events = [event(0, "started"), event(1, "failed", reason=reason, message="it went wrong")]
    with pytest.raises(kind, match="it went wrong"):
        trainer.wait(progress=False)
    assert [e.kind for e in trainer.watch()] == ["started", "failed"]


def test_a_fit_whose_server_is_gone_says_how_to_go_on(server: FakeTrainers) -> None:
    fail_once(server, "WatchFit", RefusedError(grpc.StatusCode.UNAVAILABLE))
    with (
        trocar.connect(server.target, retries=0) as client,
        pytest.raises(trocar.errors.ServerUnavailableError) as caught,
    ):
        client.trainer(TRAINER_ID).wait(progress=False)
    (note,) = caught.value.__notes__
    assert note == f"the fit continues on the server: client.trainer('{TRAINER_ID}').wait()"


def test_a_fit_with_asyncio_is_the_same(server: FakeTrainers, tmp_path: Path) -> None:
    server.events = [event(0, "started"), event(1, "step", loss=1), event(2, "finished")]
    server.events_per_call = 2
    server.pieces = [1]

    async def work() -> trocar.training.History:
        async with trocar.aio.connect(server.target) as client:
            trainer: trocar.aio.AsyncTrainer = await client.trainer(TRAINER_ID)
            await trainer.step(IMAGES, LABELS)
            await trainer.export(tmp_path / "w.safetensors")
            await client.unpublish("flowers")
            first = await trainer.start_fit("0" * 32)
            return await trainer.wait(first, progress=False)

    assert asyncio.run(work()).outcome == "finished"
    assert (tmp_path / "w.safetensors").read_bytes() == CONTENT
    assert server.applied == [0]


def test_both_trainers_have_the_same_methods() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(trocar.training.Trainer) == names(trocar.training.AsyncTrainer)
