"""Memory of a pass before it runs: sums that can be done by hand, and limits that are exact."""

import pytest
import torch

from tests.support.models.tiny_models import Plain
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import TapRequest, TensorSignature
from trocar_server.engine.resolve import pass_memory
from trocar_server.engine.resolve.pass_memory import (
    check_memory,
    graph_bytes,
    input_bytes,
    made_pass_bytes,
    memory_limit,
    pass_bytes,
    reducing_bytes,
)
from trocar_server.engine.resolve.planner import resolve_taps
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
from trocar_server.tensors.reductions.casts import Cast
from trocar_server.tensors.stats import Statistic

RECORDING = recorded(Plain, (2, 3, 8, 8))
CONV_BYTES = 2 * 4 * 8 * 8 * 4
POOL_BYTES, FC_BYTES = 2 * 4 * 4, 2 * 5 * 4
IMAGES = TensorSignature("", torch.float32, ((2, 3, 8, 8),))


def targets(*selectors: str, **options: object) -> tuple[TapTarget, ...]:
    taps = [TapRequest(parse_selector(selector), **options) for selector in selectors]  # type: ignore[arg-type]
    return tuple(resolve_taps(taps, RECORDING, 1 << 20).targets)


def test_inputs_are_as_large_as_their_tensors() -> None:
    lists = TensorSignature("boxes", torch.float64, ((3, 5), (0, 5), (2, 5)), is_list=True)
    flag = TensorSignature.of_flag("is_masked", True)
    made = [IMAGES.make("cpu"), *lists.make("cpu")]  # type: ignore[misc]
    tensors = [value for value in made if isinstance(value, torch.Tensor)]
    assert input_bytes((IMAGES, lists, flag)) == sum(tensor.nbytes for tensor in tensors)


def test_a_pass_needs_what_is_alive_until_it_stops_and_what_is_kept() -> None:
    calls = {path: RECORDING.modules[path].calls[0] for path in ("conv", "conv2", "fc")}
    assert pass_bytes(targets("conv"), RECORDING) == CONV_BYTES + calls["conv"].peak_bytes
    assert pass_bytes(targets("conv2/in"), RECORDING) == CONV_BYTES + calls["conv2"].peak_bytes_before
    both = CONV_BYTES + FC_BYTES + max(calls["conv"].peak_bytes, calls["fc"].peak_bytes)
    assert pass_bytes(targets("conv", "fc"), RECORDING) == both
    assert calls["conv"].peak_bytes < calls["conv2"].peak_bytes <= calls["fc"].peak_bytes


def test_a_parameter_needs_no_pass() -> None:
    assert pass_bytes(targets("conv/param(weight)"), RECORDING) == 4 * 3 * 3 * 3 * 4


def test_reductions_come_after_the_pass() -> None:
    plain, measured = targets("conv"), targets("conv", statistics=(Statistic.MEAN,))
    assert reducing_bytes(plain) == CONV_BYTES
    elements, copies = CONV_BYTES // 4, 5
    assert reducing_bytes(measured) == CONV_BYTES + copies * elements * 8
    assert pass_bytes(measured, RECORDING) == reducing_bytes(measured) > pass_bytes(plain, RECORDING)


def test_a_cast_value_stays_beside_the_collected_one() -> None:
    cast = targets("conv", cast=Cast(torch.float16))
    assert reducing_bytes(cast) == CONV_BYTES + CONV_BYTES // 2 + 5 * (CONV_BYTES // 4) * 8


@pytest.mark.parametrize(
    ("selector", "outputs"), [("conv2", 3 * CONV_BYTES), ("fc", 4 * CONV_BYTES + POOL_BYTES + FC_BYTES)]
)
def test_a_graph_keeps_outputs_until_the_objective_and_two_gradients(selector: str, outputs: int) -> None:
    scored = [entry.target for entry in targets(selector)]
    assert graph_bytes(scored, RECORDING) == outputs + 2 * CONV_BYTES


def test_another_batch_is_in_proportion() -> None:
    twice = TensorSignature("", torch.float32, ((4, 3, 8, 8),))
    expected = 4 * 3 * 8 * 8 * 4 + 2 * RECORDING.peak_bytes
    assert made_pass_bytes((twice,), (IMAGES,), RECORDING) == expected


def test_a_signature_without_elements_divides_nothing() -> None:
    flag = TensorSignature.of_flag("is_masked", True)
    assert made_pass_bytes((flag,), (flag,), RECORDING) == 0


def test_the_limit_is_exact_and_told() -> None:
    check_memory(1000, 1000)
    with pytest.raises(ServiceError) as caught:
        check_memory(1001, 1000)
    assert caught.value.reason is ErrorReason.PASS_TOO_LARGE
    assert caught.value.details == {"byte_count": "1001", "limit": "1000"}


def test_a_configured_limit_holds_and_otherwise_three_quarters_of_what_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory_limit(123, torch.device("cpu")) == 123
    monkeypatch.setattr(pass_memory, "memory_limit_bytes", lambda: 1000)  # a container's
    assert memory_limit(0, torch.device("cpu")) == 750
