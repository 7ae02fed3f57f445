"""Token targets: labels of the tokens of a batch of texts that the server tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import ProcessedInput, ProcessorInput, TextInput
from trocar_server.tensors.losses import LOSSES
from trocar_server.training.spec.trainer_spec import LossSpec

LEFT_OUT = -100
"""torch's own `ignore_index`."""


@dataclass(frozen=True)
class TokenLayout:
    """Layout of the tokens of a batch: samples of different lengths, padded to one.

    Attributes:
        argument: The name of the argument that holds the token ids.
        lengths: Tokens of each sample.
        padded_length: Tokens of each sample with padding.
        pads_left: Whether padding comes first.
        is_cut: Whether longer texts were cut.
    """

    argument: str
    lengths: tuple[int, ...]
    padded_length: int
    pads_left: bool
    is_cut: bool = False

    def span(self, length: int) -> slice:
        """Return where the tokens of a sample are."""
        return slice(self.padded_length - length, None) if self.pads_left else slice(0, length)


def token_layout(processed: Sequence[ProcessedInput], given: Sequence[ProcessorInput]) -> TokenLayout | None:
    """Return the layout of the texts that losses refer to, the decoder's if there are any; None without.

    Args:
        processed: What the processor made of them.
        given: The texts, and sound.
    """
    texts = [one for one in processed if one.padded_length]
    if not texts:
        return None
    chosen = max(texts, key=lambda one: bool(one.name))
    argument = next(name for name in chosen.arguments if name.endswith("input_ids"))
    lengths = tuple(sample.length for sample in chosen.samples)
    is_cut = any(isinstance(one, TextInput) and one.options.truncate for one in given)
    return TokenLayout(argument, lengths, chosen.padded_length, chosen.pads_left, is_cut)


def with_token_labels(
    losses: Sequence[LossSpec],
    targets: Mapping[str, Tensor],
    arguments: Mapping[str, object],
    layout: TokenLayout,
) -> dict[str, Tensor]:
    """Lay labels of tokens out as the tokens are, and label the tokens of causal losses with themselves.

    Args:
        losses: The terms of the loss.
        targets: The given targets by name; labels of tokens (batch, any) begin with each first token.
        arguments: Keyword arguments of the pass, token ids (batch, tokens) among them.
        layout: Their layout.

    Raises:
        ServiceError: `TARGET_REJECTED`, there are not as many labels as tokens.
    """
    found, ids = dict(targets), arguments[layout.argument]
    assert isinstance(ids, Tensor)  # as every argument that a tokenizer makes
    for spec in losses:
        if not LOSSES[spec.name].of_tokens or spec.teacher is not None:
            continue
        name = spec.target if spec.target in targets or len(targets) != 1 else next(iter(targets))
        if name in targets:
            found[name] = _laid_out(targets[name], layout, spec)
        elif spec.name == "causal_lm" and (spec.target or not targets):
            found[name] = _counted(ids, layout, ignore_index(spec))
    return found


def ignore_index(spec: LossSpec) -> int:
    """Return the label that a loss leaves out."""
    ignored = spec.options.get("ignore_index", LEFT_OUT)
    return int(ignored) if isinstance(ignored, int) else LEFT_OUT


def _counted(ids: Tensor, layout: TokenLayout, ignored: int) -> Tensor:
    labels = ids.new_full(ids.shape, ignored)
    for row, own, length in zip(labels, ids, layout.lengths, strict=True):
        row[layout.span(length)] = own[layout.span(length)]
    return labels


def _laid_out(labels: Tensor, layout: TokenLayout, spec: LossSpec) -> Tensor:
    """Return labels (batch, tokens); what is not labels of tokens as it is, for the loss to refuse."""
    if labels.ndim != 2 or labels.is_floating_point() or len(labels) != len(layout.lengths):
        return labels
    labels, ignored = labels.to(torch.int64), ignore_index(spec)
    found = labels.new_full((len(labels), layout.padded_length), ignored)
    width = labels.shape[1]
    for index, (row, own, length) in enumerate(zip(found, labels, layout.lengths, strict=True)):
        rest = own[length:]
        is_over = not layout.is_cut and bool(((rest != LEFT_OUT) & (rest != ignored)).any())
        if width < length or is_over:
            raise _uneven(index, own, length)
        row[layout.span(length)] = own[:length].masked_fill(own[:length] == LEFT_OUT, ignored)
    return found


def _uneven(index: int, labels: Tensor, length: int) -> ServiceError:
    counted = (labels != LEFT_OUT).nonzero()
    count = int(counted[-1]) + 1 if len(counted) else len(labels)
    return ServiceError(
        ErrorReason.TARGET_REJECTED,
        f"text {index} has {length} tokens and labels for {count}; give one for each token, special tokens "
        f"included, and {LEFT_OUT} where none counts",
        sample=str(index),
    )
