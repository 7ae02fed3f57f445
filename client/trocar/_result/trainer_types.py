"""Trainer status and metadata as plain values."""

from dataclasses import dataclass
from datetime import UTC, datetime

from trocar._base.names import few
from trocar._base.tables import Columns, html_facts, html_fold, html_table, number_text, size_text
from trocar.errors import BadReplyError
from trocar_api.v1 import trainer_pb2 as pb


@dataclass(frozen=True)
class StepResult:
    """Result of a training step."""

    loss: float
    """The loss, regularizers included."""
    terms: dict[str, float]
    """Its terms by name, unweighted."""
    sample_count: int
    """Samples in the batch."""
    number: int | None
    """The call's number; None for an evaluation."""
    is_update: bool
    """Whether weights were updated."""
    is_skipped: bool
    """Whether the step was left out because something was not finite."""
    update_count: int
    """Updates of the weights so far."""
    learning_rates: tuple[float, ...]
    """Of each parameter group."""
    gradient_norm: float | None
    """The norm of all gradients before `clip_norm`, with an update; None where it was not computed."""
    changed_counts: tuple[int, ...]
    """By gradient edit: elements that it changed."""
    saved_bytes: int
    """Bytes that autograd saved by way of the spool."""
    written_bytes: int
    """Bytes of these that were written to disk."""
    compute_s: float
    """Seconds that it took on the server."""

    def _repr_html_(self) -> str:
        """Show the facts in a notebook."""
        return html_facts(
            {
                "loss": number_text(self.loss),
                **{f"loss of {name}": number_text(value) for name, value in self.terms.items()},
                "samples": f"{self.sample_count:,}",
                "updates": f"{self.update_count:,}",
                "left out": "not finite" if self.is_skipped else "",
                "gradient norm": None if self.gradient_norm is None else number_text(self.gradient_norm),
                "learning rates": few([f"{rate:g}" for rate in self.learning_rates]),
            }
        )


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    loss: float
    """The loss."""
    terms: dict[str, float]
    """Its terms by name."""
    sample_count: int
    """Samples in the batch."""
    correct_count: int | None
    """Right predictions, where the loss is cross-entropy with class indices."""
    label_count: int | None = None
    """The labels that they were compared with: one for each sample, or pixel, without ignored ones."""

    @property
    def accuracy(self) -> float | None:
        """Fraction of correct predictions, 0 to 1; None where no label counts."""
        # A server of an older version sends no number of labels.
        count = self.sample_count if self.label_count is None else self.label_count
        return None if self.correct_count is None or not count else self.correct_count / count

    def _repr_html_(self) -> str:
        """Show the facts in a notebook."""
        return html_facts(
            {
                "loss": number_text(self.loss),
                **{f"loss of {name}": number_text(value) for name, value in self.terms.items()},
                "accuracy": None if self.accuracy is None else f"{self.accuracy:.2%}",
                "samples": f"{self.sample_count:,}",
            }
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the server's disk."""

    number: int
    """Counts up by one from 1."""
    created_at: datetime
    """When, in UTC."""
    update_count: int
    """Updates of the weights by then."""
    byte_count: int
    """On disk."""
    sha256: str
    """Of its tensors."""
    note: str
    """As given."""
    problem: str = ""
    """Why it cannot be restored; all but its number is unknown then."""


@dataclass(frozen=True)
class TrainerInfo:
    """Status of a trainer; prints as a few lines."""

    trainer_id: str
    """Works as a model's id in every call that takes one."""
    model_id: str
    """The model that it began with."""
    state: str
    """"ready", "fitting", "paused", "broken", or "unreadable": see `problem`."""
    created_at: datetime
    """When, in UTC."""
    expires_at: datetime
    """When it will be closed unless it is used."""
    next_number: int
    """Of the next call that changes it."""
    update_count: int
    """Updates of the weights."""
    accumulated_count: int
    """Batches that wait in the gradients for an update."""
    trainable: tuple[str, ...]
    """Names of the parameters that are trained."""
    trainable_element_count: int
    """Elements of these."""
    frozen_element_count: int
    """Elements of the others, which it shares with the model."""
    byte_count: int
    """Bytes of its own: what is trained, buffers, averages, the optimizer's state."""
    head_path: str
    """The head that was replaced; empty for none."""
    train_mode: tuple[str, ...]
    """Modules in train mode."""
    learning_rates: tuple[float, ...]
    """Of each parameter group, now."""
    checkpoint_number: int | None
    """The newest checkpoint; None without any."""
    problem: str = ""
    """Why it is "unreadable": what is wrong on the server's disk and what to do. Only its id is certain
    then."""
    problem_reason: str = ""
    """The reason of that, for example "STORAGE_UNAVAILABLE" or "CHECKPOINT_CORRUPT"."""
    skipped_checkpoints: tuple[int, ...] = ()
    """Newer checkpoints that the server could not read when it started: the trainer is as of
    `checkpoint_number`."""
    notices: tuple[str, ...] = ()
    """A sentence for each of those, and for a save that was never finished."""

    def __str__(self) -> str:
        if self.problem:
            return f"trainer {self.trainer_id}  {self.state}\n  {self.problem_reason}: {self.problem}"
        count = self.trainable_element_count
        trained = f"{count:,} of {self.frozen_element_count + count:,}"
        return "\n".join(
            (
                f"trainer {self.trainer_id}  {self.state}",
                f"  model     {self.model_id}",
                f"  trains    {trained} weights in {len(self.trainable)} parameters",
                f"  updates   {self.update_count}",
                f"  memory    {self.byte_count / 1e6:,.1f} MB of its own",
                *(f"  notice    {notice}" for notice in self.notices),
            )
        )

    def __repr__(self) -> str:
        return (
            f"<TrainerInfo {self.trainer_id} of {self.model_id}: {self.state}, {self.update_count:,} updates>"
        )

    def _repr_html_(self) -> str:
        """Show the facts, and the trained parameters folded, in a notebook."""
        newest = self.checkpoint_number
        facts = {
            **{title: text(self) for title, text in TRAINER_COLUMNS.items()},
            "learning rates": few([f"{rate:g}" for rate in self.learning_rates]),
            "checkpoint": newest,
            "closes": f"{self.expires_at:%Y-%m-%d %H:%M} UTC, unless it is used",
            "notices": "; ".join(self.notices),
            "problem": f"{self.problem_reason}: {self.problem}" if self.problem else "",
        }
        names = html_table(("parameter",), [(name,) for name in self.trainable])
        return html_facts(facts) + html_fold(f"{len(self.trainable):,} trained parameters", names)


TRAINER_COLUMNS: Columns[TrainerInfo] = {
    "trainer": lambda info: info.trainer_id,
    "model": lambda info: info.model_id,
    "state": lambda info: info.state,
    "updates": lambda info: str(info.update_count),
    "trains": lambda info: f"{info.trainable_element_count:,} weights",
    "memory": lambda info: size_text(info.byte_count),
}
"""The columns of a list of trainers."""

CHECKPOINT_COLUMNS: Columns[Checkpoint] = {
    "checkpoint": lambda saved: str(saved.number),
    "update": lambda saved: "" if saved.problem else f"{saved.update_count:,}",
    "size": lambda saved: "" if saved.problem else size_text(saved.byte_count),
    "created": lambda saved: "" if saved.problem else f"{saved.created_at:%Y-%m-%d %H:%M} UTC",
    "note": lambda saved: saved.problem or saved.note,
}
"""The columns of a list of checkpoints."""


def trainer_info(message: pb.Trainer) -> TrainerInfo:
    """Convert a trainer."""
    return TrainerInfo(
        trainer_id=message.trainer_id,
        model_id=message.spec.model_id,
        state=message.state,
        created_at=_time(message.created_at_s),
        expires_at=_time(message.expires_at_s),
        next_number=message.next_number,
        update_count=message.update_count,
        accumulated_count=message.accumulated_count,
        trainable=tuple(message.trainable),
        trainable_element_count=message.trainable_element_count,
        frozen_element_count=message.frozen_element_count,
        byte_count=message.byte_count,
        head_path=message.head_path,
        train_mode=tuple(message.train_mode),
        learning_rates=tuple(message.learning_rates),
        checkpoint_number=message.checkpoint_number if message.HasField("checkpoint_number") else None,
        problem=message.problem,
        problem_reason=message.problem_reason,
        skipped_checkpoints=tuple(message.skipped_checkpoint_numbers),
        notices=tuple(message.notices),
    )


def step_result(message: pb.StepResult) -> StepResult:
    """Convert the result of a call that changes a trainer."""
    return StepResult(
        loss=message.loss,
        terms=dict(message.terms),
        sample_count=message.sample_count,
        number=message.number if message.HasField("number") else None,
        is_update=message.is_update,
        is_skipped=message.is_skipped,
        update_count=message.update_count,
        learning_rates=tuple(message.learning_rates),
        gradient_norm=message.gradient_norm if message.HasField("gradient_norm") else None,
        changed_counts=tuple(message.changed_counts),
        saved_bytes=message.saved_byte_count,
        written_bytes=message.written_byte_count,
        compute_s=message.timing.compute_s,
    )


def evaluation(message: pb.StepResult) -> Evaluation:
    """Convert the result of an evaluation."""
    correct = message.correct_count if message.HasField("correct_count") else None
    labels = message.label_count if message.HasField("label_count") else None
    return Evaluation(message.loss, dict(message.terms), message.sample_count, correct, labels)


def checkpoint(message: pb.Checkpoint) -> Checkpoint:
    """Convert a checkpoint."""
    return Checkpoint(
        number=message.number,
        created_at=_time(message.created_at_s),
        update_count=message.update_count,
        byte_count=message.byte_count,
        sha256=message.sha256,
        note=message.note,
        problem=message.problem,
    )


def _time(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OSError, OverflowError, ValueError) as error:
        raise BadReplyError(f"{seconds} s after 1970 is no time") from error
