"""Trainers and results of steps as messages."""

from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1.extraction_pb2 import ServerTiming
from trocar_server.rpc.trainer_specs import spec_message
from trocar_server.training.step_result import EvalResult, StepResult
from trocar_server.training.trainer import Trainer


def trainer_message(trainer: Trainer) -> pb.Trainer:
    """Describe a trainer as it is. Owner thread only."""
    facts = trainer.core.describe()
    return pb.Trainer(
        trainer_id=trainer.trainer_id,
        spec=spec_message(trainer.spec),
        created_at_s=trainer.created_at_s,
        expires_at_s=trainer.expires_at_s,
        next_number=trainer.numbering.next_number,
        update_count=trainer.core.update_count,
        accumulated_count=facts.accumulated_count,
        trainable=facts.trainable,
        trainable_element_count=facts.trainable_element_count,
        frozen_element_count=facts.frozen_element_count,
        byte_count=facts.byte_count,
        head_path=facts.head_path,
        train_mode=facts.train_mode,
        state=trainer.state,
        learning_rates=facts.learning_rates,
        checkpoint_number=trainer.checkpoint_number,
    )


def result_message(result: StepResult, number: int) -> pb.StepResult:
    """Say what became of a numbered call."""
    return pb.StepResult(
        number=number,
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        is_update=result.is_update,
        is_skipped=result.is_skipped,
        update_count=result.update_count,
        learning_rates=result.learning_rates,
        gradient_norm=result.gradient_norm,
        changed_counts=[count for _, count in sorted(result.changed.items())],
        saved_byte_count=result.saved_bytes,
        written_byte_count=result.written_bytes,
        timing=ServerTiming(compute_s=result.compute_s),
    )


def eval_message(result: EvalResult) -> pb.StepResult:
    """Say what an evaluation gave."""
    return pb.StepResult(
        loss=result.loss,
        terms=result.terms,
        sample_count=result.sample_count,
        correct_count=result.correct_count,
        timing=ServerTiming(compute_s=result.compute_s),
    )
