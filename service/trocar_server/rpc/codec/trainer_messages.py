"""Codec of trainers and step results: to messages."""

from math import isnan
from operator import itemgetter

from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1.extraction_pb2 import ServerTiming
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.codec.trainer_specs import spec_message
from trocar_server.training.files.checkpoint_files import Checkpoint
from trocar_server.training.files.trainer_store import UnreadableTrainer
from trocar_server.training.model.description import TrainerDescription
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import Applied, Evaluated


def trainer_message(trainer: Trainer, facts: TrainerDescription) -> pb.Trainer:
    """Describe a trainer's current state.

    Args:
        trainer: The trainer.
        facts: Its composition, from `TrainerCore.describe`.
    """
    return pb.Trainer(
        trainer_id=trainer.trainer_id,
        spec=spec_message(trainer.spec),
        created_at_s=trainer.created_at_s,
        expires_at_s=trainer.expires_at_s,
        next_number=trainer.numbering.next_number,
        update_count=trainer.core.update_count,
        accumulated_count=trainer.core.accumulated_count,
        trainable=facts.trainable,
        trainable_element_count=facts.trainable_count,
        frozen_element_count=facts.frozen_count,
        byte_count=facts.owned_bytes,
        head_path=trainer.core.head_path,
        train_mode=facts.train_mode,
        state=trainer.state,
        learning_rates=trainer.core.learning_rates,
        checkpoint_number=trainer.checkpoint_number,
        skipped_checkpoint_numbers=trainer.skipped_checkpoints,
        notices=map(sendable, trainer.notices),
    )


def unreadable_message(found: UnreadableTrainer) -> pb.Trainer:
    """Describe a trainer that cannot be restored, as far as known."""
    message = pb.Trainer(
        trainer_id=found.trainer_id,
        state="unreadable",
        problem=sendable(found.error.message),
        problem_reason=found.error.reason,
    )
    if found.record is not None:
        message.created_at_s = found.record.created_at_s
        message.spec.model_id = found.record.base_model_id
    return message


def result_message(applied: Applied) -> pb.StepResult:
    """Result of a numbered call."""
    result = applied.result
    return pb.StepResult(
        number=applied.number,
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        is_update=result.is_update,
        is_skipped=result.is_skipped,
        update_count=applied.update_count,
        learning_rates=result.learning_rates,
        gradient_norm=None if isnan(result.gradient_norm) else result.gradient_norm,
        changed_counts=map(itemgetter(1), sorted(result.changed.items())),
        saved_byte_count=result.saved_bytes,
        written_byte_count=result.written_bytes,
        timing=ServerTiming(compute_s=result.compute_s),
    )


def eval_message(evaluated: Evaluated) -> pb.StepResult:
    """Result of an evaluation."""
    result = evaluated.result
    return pb.StepResult(
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        correct_count=evaluated.correct_count,
        timing=ServerTiming(compute_s=result.compute_s),
    )


def checkpoint_message(checkpoint: Checkpoint) -> pb.Checkpoint:
    """Describe a checkpoint."""
    return pb.Checkpoint(
        number=checkpoint.number,
        created_at_s=checkpoint.created_at_s,
        update_count=checkpoint.update_count,
        byte_count=checkpoint.byte_count,
        sha256=checkpoint.sha256,
        note=checkpoint.note,
    )
