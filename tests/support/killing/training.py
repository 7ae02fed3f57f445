"""Callers that train: steps with a spool, and fits. After any kill they are where plain torch is."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trocar
from tests.support.killing.moments import Moments
from tests.support.oracles.tiny_training import (
    PlainTrainer,
    assert_weights,
    fitted_plainly,
    make_trainer,
    samples,
)

DATA, BATCH, EPOCHS, CHECKPOINT_EVERY = samples(40, 11), 4, 8, 3
_MOST_PUBLISHED, _MOST_UPDATES = 2, 60


def _spool() -> Any:
    """Everything that autograd saves goes to disk."""
    return trocar.training.save_on_disk(budget_bytes=0, min_bytes=1)


def _close_others(client: trocar.Client, wanted: str | None) -> None:
    for info in client.trainers():
        if info.trainer_id != wanted:
            client.trainer(info.trainer_id).close()


class Stepping:
    """Steps with a spool, saves, exports, publishes, closes."""

    name = "steps"

    def __init__(self, moments: Moments, seed: int, folder: Path) -> None:
        self._moments, self._chance, self._folder = moments, random.Random(seed), folder
        self._trainer_id: str | None = None
        self._is_closing = False
        self._number = 0
        self._plain = PlainTrainer()
        """Where the trainer was at the last check."""
        self._plain_number = 0
        self._saved = 0
        self._published: dict[str, tuple[int, bytes]] = {}
        """Names, with the step and the answer then."""
        self._publishing: str | None = None
        self._unpublishing: str | None = None
        self._next = 0
        self.acknowledged = 0

    def work(self, client: trocar.Client) -> None:
        """Make a few steps, then do something with them."""
        if self._trainer_id is None:
            self._begin(client)
        assert self._trainer_id is not None
        trainer = client.trainer(self._trainer_id)
        for _ in range(self._chance.randrange(5)):
            with self._moments.of("step"):
                trainer.step(*samples(4, self._number), number=self._number)
            self._number += 1
        with self._moments.of("save"):
            self._saved = max(self._saved, trainer.save().update_count)
        self.acknowledged += 1
        if self._chance.random() < 0.2:
            with self._moments.of("export"):
                trainer.export(self._folder / "exported.safetensors")
        if self._chance.random() < 0.4:
            self._publish(client, trainer)
        if self._number >= _MOST_UPDATES:
            self._is_closing = True
            with self._moments.of("close"):
                trainer.close()
            self._forget()

    def check(self, client: trocar.Client) -> None:
        """Compare the trainer with plain torch, and what was published with what it was."""
        ids = {info.trainer_id for info in client.trainers()}
        if self._trainer_id is None or (self._is_closing and self._trainer_id not in ids):
            self._forget()
        else:
            assert self._trainer_id in ids, "the trainer is lost"
            self._check_trainer(client.trainer(self._trainer_id))
        _close_others(client, self._trainer_id)
        self._check_published(client)

    def _begin(self, client: trocar.Client) -> None:
        with self._moments.of("create"):
            self._trainer_id = make_trainer(client, saved_tensors=_spool()).trainer_id

    def _forget(self) -> None:
        self._trainer_id, self._is_closing = None, False
        self._number = self._plain_number = self._saved = 0
        self._plain = PlainTrainer()

    def _check_trainer(self, trainer: trocar.training.Trainer) -> None:
        self._is_closing = False
        reached = trainer.info()
        assert reached.update_count >= self._saved, f"{self._saved} updates were saved: {reached}"
        assert reached.next_number == reached.update_count
        assert reached.next_number <= self._number + 1
        if trainer.checkpoints():
            assert max(one.update_count for one in trainer.checkpoints()) >= self._saved
        while self._plain_number < reached.next_number:
            self._plain.step(samples(4, self._plain_number))
            self._plain_number += 1
        assert self._plain_number == reached.next_number
        assert_weights(trainer, self._plain.model, self._folder)
        self._number = self._saved = self._plain_number

    def _publish(self, client: trocar.Client, trainer: trocar.training.Trainer) -> None:
        if len(self._published) >= _MOST_PUBLISHED:
            self._unpublishing = min(self._published)
            with self._moments.of("unpublish"):
                client.unpublish(self._unpublishing)
            del self._published[self._unpublishing]
            self._unpublishing = None
        self._publishing, self._next = f"model-{self._next:05}", self._next + 1
        with self._moments.of("publish"):
            trainer.publish(self._publishing)
        self._published[self._publishing] = self._number, self._answer()
        self._publishing = None
        self.acknowledged += 1

    def _answer(self) -> bytes:
        """Return what plain torch's model of now answers."""
        plain, number = copy.deepcopy(self._plain), self._plain_number
        for missing in range(number, self._number):
            plain.step(samples(4, missing))
        with torch.no_grad():
            return bytes(plain.model.eval()(torch.from_numpy(_INPUTS)).numpy().tobytes())

    def _check_published(self, client: trocar.Client) -> None:
        loaded = {model.model_id for model in client.models() if model.state == "loaded"}
        if self._unpublishing is not None and self._unpublishing not in loaded:
            del self._published[self._unpublishing]
        self._unpublishing = None
        assert set(self._published) <= loaded, f"published models are lost: {set(self._published) - loaded}"
        others = {name for name in loaded if name.startswith("model-")} - set(self._published)
        assert others <= {self._publishing}, f"nobody publishes {others}"
        for name, (number, expected) in self._published.items():
            found = client.extract(name, _INPUTS, "fc")["fc"].tobytes()
            assert found == expected, f"{name}, published after {number} steps, answers something else"
        for name in sorted(others):
            client.unpublish(name)
        self._publishing = None


_INPUTS: np.ndarray = samples(4, 99)[0]


class Fitting:
    """Fits, one after another, watched all the time."""

    name = "fits"

    def __init__(self, moments: Moments, folder: Path) -> None:
        self._moments, self._folder = moments, folder
        self._expected, self._losses = fitted_plainly(DATA, EPOCHS, BATCH)
        self._dataset_id: str | None = None
        self._trainer_id: str | None = None
        self._first: int | None = None
        self._seen: list[Any] = []
        self.acknowledged = 0

    def work(self, client: trocar.Client) -> None:
        """Begin a fit, or watch the one that runs to its end."""
        if self._dataset_id is None:
            images, labels = DATA
            self._dataset_id = client.upload_dataset(images, targets=labels, name="fit").dataset_id
        if self._first is None:
            self._begin(client, self._dataset_id)
        assert self._trainer_id is not None
        assert self._first is not None
        trainer = client.trainer(self._trainer_id)
        for event in trainer.watch(self._first + len(self._seen)):
            with self._moments.of(f"fit's {event.kind}"):
                self._seen.append(event)
        self._compare(trainer)
        self.acknowledged += 1
        trainer.close()
        self._trainer_id = self._first = None

    def check(self, client: trocar.Client) -> None:
        """See whether data set and trainer are there; where a fit stands is compared at its end."""
        if self._dataset_id is not None:
            found = {dataset.dataset_id: dataset.is_complete for dataset in client.datasets()}
            assert found.get(self._dataset_id), "the fit's data set is lost"
        ids = {info.trainer_id for info in client.trainers()}
        is_over = bool(self._seen) and self._seen[-1].kind == "finished"  # it may be closed already
        if self._first is not None and self._trainer_id is not None:
            assert is_over or self._trainer_id in ids, "the trainer of a fit is lost"
            if is_over and self._trainer_id in ids:
                self._compare(client.trainer(self._trainer_id))
        if self._first is None or is_over:
            self._trainer_id = self._first = None
        _close_others(client, self._trainer_id)

    def _begin(self, client: trocar.Client, dataset_id: str) -> None:
        _close_others(client, None)
        with self._moments.of("begin fit"):
            trainer = make_trainer(client, saved_tensors=_spool())
            self._trainer_id, self._seen = trainer.trainer_id, []
            self._first = trainer.start_fit(
                dataset_id, epochs=EPOCHS, batch_size=BATCH, checkpoint_every=CHECKPOINT_EVERY
            )

    def _compare(self, trainer: trocar.training.Trainer) -> None:
        assert self._first is not None
        numbers = [event.number for event in self._seen]
        assert numbers == list(range(self._first, self._first + len(numbers))), "events are lost or doubled"
        steps = [event for event in self._seen if event.kind == "step"]
        assert [event["loss"] for event in steps] == self._losses, "a fit has other losses"
        assert_weights(trainer, self._expected, self._folder)
