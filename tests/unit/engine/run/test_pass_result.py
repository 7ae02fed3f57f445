"""One pass: what is collected, how it is reduced, what its failures become."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models.odd_models import Dtypes, KeepsState, OnlyNegative, Sparse
from tests.support.models.tiny_models import Plain
from tests.support.servers.footprint import hook_count
from tests.support.servers.serving import rebuilt
from tests.unit.engine.deployments import deployment, hosted
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import PassSpec
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.execute.executor import ReadyCall
from trocar_server.engine.request.plan import TapRequest
from trocar_server.engine.resolve.planner import resolve_taps
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.run.pass_result import FeatureMap, PassResult, finish_pass
from trocar_server.engine.schedule.lease import Replica, StateWrittenError
from trocar_server.errors import ServiceError
from trocar_server.models import Pristine
from trocar_server.surgery import (
    PassAborted,
    PassGuard,
    Recording,
    parse_selector,
    record_calls,
)
from trocar_server.tensors.stats import Scope, Statistic

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
PLAIN = recorded(Plain, (2, 3, 8, 8))


def replica_of(kind: type[nn.Module]) -> Replica:
    return Replica(Pristine(rebuilt(kind)))


def targets(recording: Recording, *taps: TapRequest) -> tuple[TapTarget, ...]:
    return resolve_taps(taps, recording, 1 << 30).targets


def tap(selector: str, **options: object) -> TapRequest:
    return TapRequest(parse_selector(selector), **options)  # type: ignore[arg-type]


def run(
    replica: Replica,
    wanted: tuple[TapTarget, ...],
    inputs: torch.Tensor = IMAGES,
    guard: PassGuard | None = None,
) -> PassResult:
    guard = guard or PassGuard()
    call = ReadyCall(([inputs], {}), PassSpec([target.target for target in wanted]), guard)
    (collected,) = Eager(replica).run([call])
    with torch.inference_mode():
        return finish_pass(collected, wanted, guard, (), time.perf_counter())


def tensor_of(feature_map: FeatureMap) -> torch.Tensor:
    values, output = feature_map.values, feature_map.output
    assert values is not None
    assert output.dtype is not None
    if not values.size:  # torch views no bytes of an empty array (2.14)
        return torch.empty(output.shape, dtype=output.dtype)
    return torch.from_numpy(values).view(output.dtype).reshape(output.shape)


def test_a_reply_of_weights_that_change_is_not_changed_with_them() -> None:
    made = deployment(Plain, (3, 8, 8))
    recording = made.record(made.example_signature, PassGuard(), frozenset(["fn"]))
    wanted = targets(recording, tap("fn:linear@0/in[1]"), tap("fc/param(weight)"))
    found = run(Replica(made.hosted.pristine, is_live=True), wanted, IMAGES[:1]).feature_maps
    weight = made.hosted.module.get_parameter("fc.weight")
    before = weight.clone()
    with torch.inference_mode():
        weight.add_(1.0)
    assert len(found) == 2
    assert all(torch.equal(tensor_of(one), before) for one in found)


def test_values_are_bytes_in_row_major_order() -> None:
    replica = replica_of(Plain)
    (found,) = run(replica, targets(PLAIN, tap("conv"))).feature_maps
    with torch.inference_mode():
        assert torch.equal(tensor_of(found), replica.module.get_submodule("conv")(IMAGES))


@pytest.mark.parametrize("name", list(Dtypes()(torch.zeros(2, 6))))
def test_a_value_of_any_dtype_and_layout_comes_as_it_is(name: str) -> None:
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    expected = Dtypes()(inputs)[name]
    (found,) = run(
        replica_of(Dtypes), targets(recorded(Dtypes, (2, 6)), tap(f'/out["{name}"]')), inputs
    ).feature_maps
    assert found.output.dtype == expected.dtype
    assert found.output.shape == expected.shape
    assert torch.equal(tensor_of(found), expected)


def test_statistics_come_without_values_when_only_they_are_wanted() -> None:
    wanted = targets(PLAIN, tap("conv", values=False, statistics=(Statistic.MIN,), scope=Scope.CHANNEL))
    (found,) = run(replica_of(Plain), wanted).feature_maps
    with torch.inference_mode():
        minimum = rebuilt(Plain).conv(IMAGES).amin((0, 2, 3))
    assert found.values is None
    assert found.statistics is not None
    assert np.array_equal(found.statistics.values[Statistic.MIN], minimum.numpy())


def test_a_value_that_the_model_keeps_and_changes_is_not_shared_with_it() -> None:
    """The next pass would change a reply that is still on its way out."""
    replica, inputs = replica_of(KeepsState), torch.ones(1, 4)
    wanted = targets(recorded(KeepsState, (1, 4)), tap("/out"))
    with pytest.raises(StateWrittenError):  # the first pass that shows it: its value would be put back, too
        run(replica, wanted, inputs)
    (first,) = run(replica, wanted, inputs).feature_maps
    before = tensor_of(first).clone()
    run(replica, wanted, inputs)
    assert torch.equal(tensor_of(first), before)


def test_a_pass_runs_without_gradients() -> None:
    (found,) = run(replica_of(Plain), targets(PLAIN, tap("fc"))).feature_maps
    assert not tensor_of(found).requires_grad


def test_a_module_that_this_input_does_not_reach_is_reported() -> None:
    with_negative = record_calls(OnlyNegative(), [-torch.ones(2, 3)], is_symbolic=False)
    with pytest.raises(ServiceError) as caught:
        run(replica_of(OnlyNegative), targets(with_negative, tap("late")), torch.ones(2, 3))
    assert caught.value.reason is ErrorReason.MODULE_NOT_CALLED


@pytest.mark.parametrize("fails", [False, True])
def test_the_guard_of_a_pass_leaves_with_it(fails: bool) -> None:
    replica = replica_of(Plain)
    guard = PassGuard()
    try:
        wanted = targets(PLAIN, tap("fc"))
        run(replica, wanted, IMAGES[:, : 2 if fails else 3], guard)
    except RuntimeError:
        assert fails
    guard.cancel()
    replica.module(IMAGES)


def test_no_hook_is_left_after_a_pass_that_was_cancelled() -> None:
    replica = replica_of(Plain)
    before, guard = hook_count(replica.module), PassGuard()
    guard.cancel()
    wanted = targets(PLAIN, tap("fc"))
    with pytest.raises(PassAborted):
        run(replica, wanted, guard=guard)
    assert hook_count(replica.module) == before


def test_a_deadline_that_passes_during_the_reductions_is_noticed() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(x)

    replica = replica_of(Slow)
    guard = PassGuard()
    replica.module.get_submodule("last").register_forward_hook(lambda *_: guard.cancel())
    wanted = targets(recorded(Slow, (2, 3, 8, 8)), tap("last"))
    with pytest.raises(PassAborted):
        run(replica, wanted, guard=guard)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PassAborted(ErrorReason.CANCELLED), ErrorReason.CANCELLED),
        (PassAborted(ErrorReason.DEADLINE_EXCEEDED), ErrorReason.DEADLINE_EXCEEDED),
        (torch.OutOfMemoryError("CUDA out of memory"), ErrorReason.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ErrorReason.OUT_OF_MEMORY),
        (MemoryError(), ErrorReason.OUT_OF_MEMORY),
        (RuntimeError("shapes cannot be multiplied"), ErrorReason.INPUT_REJECTED),
        (TypeError("forward() missing 1 argument"), ErrorReason.INPUT_REJECTED),
        (AssertionError(), ErrorReason.INPUT_REJECTED),
        (StopIteration(), ErrorReason.INPUT_REJECTED),
        (ServiceError(ErrorReason.EMPTY_BATCH, "empty"), ErrorReason.EMPTY_BATCH),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_pass_raises_becomes_a_reason(error: BaseException, reason: ErrorReason) -> None:
    with pytest.raises(ServiceError) as caught, domain_errors(hosted(Plain, (3, 8, 8))):
        raise error
    assert caught.value.reason is reason
    assert caught.value.message


def test_out_of_memory_is_told_though_it_is_a_runtime_error_without_text() -> None:
    with pytest.raises(ServiceError) as caught, domain_errors(hosted(Plain, (3, 8, 8))):
        raise torch.OutOfMemoryError("")
    assert caught.value.reason is ErrorReason.OUT_OF_MEMORY


def test_a_sparse_value_is_refused_for_what_it_is() -> None:
    """Not as inputs that the model cannot take."""
    recording = recorded(Sparse, (2, 3), is_symbolic=False)
    with pytest.raises(ServiceError) as caught, domain_errors(hosted(Sparse)):
        run(replica_of(Sparse), targets(recording, tap("sparse")), torch.eye(2, 3))
    assert caught.value.reason is ErrorReason.NOT_A_TENSOR


def test_a_pass_says_how_long_it_took() -> None:
    started = time.perf_counter()
    result = run(replica_of(Plain), targets(PLAIN, tap("fc")))
    assert 0 < result.compute_s <= time.perf_counter() - started
