"""Prompts: each prompt of a run as a request of its own, as if it were the only one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import (
    ArgumentInput,
    Payload,
    Payloads,
    Plan,
    TensorInput,
    TensorListInput,
)
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import TextInput

MAX_SEQUENCES = 1024
"""The most sequences of one run."""
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_NAMES = frozenset(("", "input_ids"))


def split_prompts(plan: Plan, payloads: Payloads, sample_count: int) -> list[tuple[Plan, Payloads]]:
    """Return a request for each prompt; taps, edits and their tensors are shared.

    Args:
        plan: Prompts, taps and edits, as they were sent.
        payloads: Of the plan.
        sample_count: The samples of each prompt.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the inputs are no prompts, or there are too many.
    """
    given = (*plan.unprocessed, *plan.inputs)
    if len(given) != 1 or given[0].name not in _NAMES:
        raise _refused("the prompts are the only input: texts, or their token ids as `input_ids`")
    (entry,) = given
    if isinstance(entry, TextInput):
        split = [
            (replace(plan, unprocessed=(replace(entry, entries=(text,)),)), payloads)
            for text in entry.entries
        ]
    elif isinstance(entry, (TensorInput, TensorListInput)):
        split = [
            (replace(plan, inputs=(own,)), replace(payloads, inputs=[data]))
            for own, data in _rows(entry, payloads.inputs)
        ]
    else:
        raise _refused("a prompt is a text, a chat or token ids")
    count = len(split)
    if count * sample_count > MAX_SEQUENCES:
        raise _refused(
            f"{count:,} prompts with n={sample_count:,} are {count * sample_count:,} texts; at most "
            f"{MAX_SEQUENCES:,} come in one call"
        )
    return split


@contextmanager
def errors_of_prompt(index: int, count: int) -> Iterator[None]:
    """Name the prompt in errors of the body, where there are several.

    Args:
        index: The index of the prompt.
        count: The number of prompts.
    """
    try:
        yield
    except ServiceError as error:
        if count == 1:
            raise
        named = ServiceError(error.reason, f"prompt {index}: {error.message}", **error.details)
        named.retry_after_s = error.retry_after_s
        raise named from error


def _rows(
    entry: TensorInput | TensorListInput, payloads: Sequence[Payload]
) -> Iterator[tuple[ArgumentInput, Payload]]:
    """Yield the token ids of each prompt as a tensor of shape (1, tokens), with its bytes."""
    if entry.dtype not in _INTEGERS or entry.convert_to is not None:
        raise _refused("token ids are whole numbers")
    if isinstance(entry, TensorListInput):
        if any(len(shape) != 1 for shape in entry.shapes):
            raise _refused("in a list of arrays each is one prompt, of shape (tokens,)")
        counts, datas = [count for (count,) in entry.shapes], list(payloads)
    else:
        if len(entry.shape) != 2:
            raise _refused(f"token ids have the shape (prompts, tokens), not {entry.shape}")
        row_count, count = entry.shape
        counts = [count] * row_count
        datas = list(payloads[0].reshape(row_count, -1)) if row_count else []
    if not counts or not all(counts):
        raise _refused("a prompt has at least one token")
    for count, data in zip(counts, datas, strict=True):
        yield TensorInput("input_ids", entry.dtype, (1, count)), data


def _refused(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
