"""Logit lens: what follows the last block of a language model, for values of any block. Owner thread only.

    lens = LogitLens.of(deployment)
    lens.scores(vectors)      # (rows, width) to (rows, vocabulary)

# Note: [Logit lens]
Behind the last block come a norm and the head, in some families also a projection, a scale or a cap of the
logits: code of the model's own forward. It is not imitated. A copy of the model, which shares its weights,
runs on texts of one token; its blocks compute nothing, and the last one returns the given vectors, one for
each text. That nothing else goes into the logits is checked each time: of the last block's own output this
must give the logits of a full pass.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.engine.run.pass_result import Heads
from trocar_server.errors import ServiceError
from trocar_server.models import stages_for
from trocar_server.models.huggingface.causal import CausalModel
from trocar_server.surgery.structure import Picks, put
from trocar_server.tensors.reductions import Lens

_TOLERANCE = 1e-4


class LogitLens:
    """The part of a model behind its last block.

    Args:
        module: A copy of the model, in eval mode, for this alone.
        blocks: The paths of its blocks, in order.
        arguments: Of its forward: one token.

    Attributes:
        vocabulary: The number of tokens.

    Raises:
        ValueError: Something else goes into the logits.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str], arguments: dict[str, Any]) -> None:
        self._module, self._arguments = module, arguments
        outputs: dict[str, Any] = {}
        parts = [(path, module.get_submodule(path)) for path in blocks]
        handles = [part.register_forward_hook(partial(_keep, outputs, path)) for path, part in parts]
        logits = self._logits(1)
        for handle in handles:
            handle.remove()
        if outputs.keys() != set(blocks):
            raise ValueError("some of its blocks are not called")
        last, self._last = outputs[blocks[-1]], outputs[blocks[-1]]
        self._pick: Picks = () if isinstance(last, torch.Tensor) else (0,)
        value: Any = last if isinstance(last, torch.Tensor) else last[0]
        for path, part in parts:
            part.forward = partial(_given, outputs, path)
        self._outputs, self._path = outputs, blocks[-1]
        self.vocabulary = logits.shape[-1]
        self._width, self._dtype = value.shape[-1], value.dtype
        again = self.scores(value[0])
        if again.shape != logits.shape or not torch.allclose(
            again.float(), logits.float(), _TOLERANCE, _TOLERANCE, equal_nan=True
        ):
            raise ValueError("more than the last block's output goes into its logits")

    @classmethod
    def of(cls, deployment: Deployment) -> "LogitLens":
        """Return the lens of a model as its weights are now.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it has none, with the reason.
        """
        hosted = deployment.hosted
        parameters = inspect.signature(hosted.module.forward).parameters
        arguments: dict[str, Any] = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=hosted.device)}
        if "use_cache" in parameters:
            arguments["use_cache"] = False
        try:
            with torch.no_grad():
                return cls(hosted.pristine.apart().eval(), blocks_of(deployment), arguments)
        except ServiceError:
            raise
        except Exception as error:
            raise _refused(deployment, str(error) or type(error).__name__) from error

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits, (rows, vocabulary), of vectors (rows, width).

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the vectors have another width.
        """
        if rows.shape[-1] != self._width:
            raise _wrong_width(rows.shape[-1], self._width)
        self._outputs[self._path] = put(self._last, self._pick, rows.to(self._dtype)[:, None])
        return self._logits(len(rows))

    def _logits(self, count: int) -> torch.Tensor:
        """Run so many texts of one token: some families give the result the shape of the ids."""
        ids = self._arguments["input_ids"].expand(count, 1)
        with torch.no_grad():
            logits: torch.Tensor = self._module(**{**self._arguments, "input_ids": ids}).logits[:, 0]
        return logits


@dataclass(frozen=True)
class OwnLogits:
    """The head of values that are the model's logits already."""

    vocabulary: int

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return rows


def heads_of(deployment: Deployment, targets: Sequence[TapTarget]) -> Heads:
    """Return the head that reads each of these values as tokens; None for those that none reads."""
    wanted = [target for target in targets if target.tap.reads_tokens]
    lens: LogitLens | None = None
    if any(not _are_logits(target) for target in wanted):
        lens = LogitLens.of(deployment)
    own = OwnLogits(CausalModel.of(deployment.hosted).vocabulary) if wanted else None
    return lambda target: own if _are_logits(target) else lens


def _are_logits(target: TapTarget) -> bool:
    """Whether a value is the model's own output of logits."""
    place = target.target
    return place.kind == "module" and (place.path, place.port, place.picks) == ("", "out", ("logits",))


def check_lens(deployment: Deployment, plan: Plan, resolved: Resolved | None) -> None:
    """Refuse a lens that a model does not have, before anything is computed.

    Args:
        deployment: The model.
        plan: The request.
        resolved: Its values, as far as they are known.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `REDUCTION_REJECTED`, with the reason.
    """
    wanted = [entry.top_k for tap in plan.taps for entry in tap.reductions if isinstance(entry, Lens)]
    if not wanted:
        return
    try:
        vocabulary = CausalModel.of(deployment.hosted).vocabulary
    except ServiceError as error:
        raise _refused(deployment, error.message) from None
    blocks = blocks_of(deployment)
    if max(wanted) > vocabulary:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"top_k of a lens is at most the model's {vocabulary} tokens"
        )
    calls = deployment.example.modules[blocks[-1]].calls
    shapes = [leaf.shape for call in calls for leaf in call.outputs if leaf.shape]
    for target in () if resolved is None or not shapes else resolved.targets:
        shape = target.leaf.shape or ()
        is_read = target.tap.reads_tokens and not _are_logits(target)
        if is_read and shape and shape[-1] != shapes[0][-1]:
            with target.named_errors():
                raise _wrong_width(shape[-1], shapes[0][-1])


def blocks_of(deployment: Deployment) -> list[str]:
    """Return the paths of a model's blocks, in order.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, they are not known.
    """
    stages = stages_for(deployment.hosted)
    blocks: list[str] = []
    while (name := f"layer[{len(blocks)}]") in stages:
        blocks.append(stages[name])
    if not blocks:
        raise _refused(deployment, "which of its modules are blocks is not known")
    return blocks


def _keep(outputs: dict[str, Any], path: str, _module: nn.Module, _arguments: object, output: Any) -> None:
    outputs[path] = output


def _given(outputs: dict[str, Any], path: str, *_: object, **__: object) -> Any:
    return outputs[path]


def _refused(deployment: Deployment, problem: str) -> ServiceError:
    model_id = deployment.hosted.spec.model_id
    return ServiceError(ErrorReason.INVALID_ARGUMENT, f"'{model_id}' has no logit lens: {problem}")


def _wrong_width(width: int, expected: int) -> ServiceError:
    return ServiceError(
        ErrorReason.REDUCTION_REJECTED,
        f"a lens reads vectors of the width {expected} of the last block's output, and these have {width}",
    )
