"""From the names of outputs to taps."""

import pytest

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import statistics_pb2 as stats
from trocar_api.v1 import tap_pb2
from trocar_server.config import Limits
from trocar_server.errors import ServiceError
from trocar_server.rpc.oip.inference_outputs import Taps, read_outputs
from trocar_server.rpc.oip.oip_messages import ModelInferRequest


def messages(taps: Taps) -> list[tap_pb2.Tap]:
    return [tapped.message for tapped in taps.tapped]


def read(*names: str) -> Taps:
    return read_outputs(ModelInferRequest(outputs=[{"name": name} for name in names]), Limits())


def tap(
    selector: str, *statistics: stats.Statistic.ValueType, values: bool = True, **fields: object
) -> tap_pb2.Tap:
    fields.setdefault("scope", stats.STATISTIC_SCOPE_ALL)
    return tap_pb2.Tap(selector=selector, values=values, statistics=statistics, **fields)  # type: ignore[arg-type]


def test_the_models_own_output_is_the_default() -> None:
    assert messages(read()) == [tap("/out")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer4", tap("layer4")),
        ("layer4:mean", tap("layer4", stats.STATISTIC_MEAN, values=False)),
        ("/out:max", tap("/out", stats.STATISTIC_MAX, values=False)),
        ("layer4:Bottleneck", tap("layer4:Bottleneck")),
        ("**:Conv2d:l2", tap("**:Conv2d", stats.STATISTIC_L2, values=False)),
        ('x["a:mean"]', tap('x["a:mean"]')),
        (
            "layer4:std:sample",
            tap("layer4", stats.STATISTIC_STD, values=False, scope=stats.STATISTIC_SCOPE_SAMPLE),
        ),
        (
            "layer4:zero_fraction:channel",
            tap("layer4", stats.STATISTIC_ZERO_FRACTION, values=False, scope=stats.STATISTIC_SCOPE_CHANNEL),
        ),
    ],
)
def test_a_name_is_a_selector_and_perhaps_a_statistic(name: str, expected: tap_pb2.Tap) -> None:
    assert messages(read(name)) == [expected]


def test_a_selector_is_tapped_once_for_its_value_and_numbers() -> None:
    found = read("fc", "conv", "conv:mean", "conv:std")
    assert messages(found) == [tap("conv", stats.STATISTIC_MEAN, stats.STATISTIC_STD), tap("fc")]
    assert found.places == (1, 0, 0, 0)


def test_another_scope_is_another_tap() -> None:
    found = read("conv:mean", "conv", "conv:mean:channel")
    assert [message.scope for message in messages(found)] == [
        stats.STATISTIC_SCOPE_ALL,
        stats.STATISTIC_SCOPE_CHANNEL,
    ]
    assert len({tapped.suffix for tapped in found.tapped}) == 2
    assert found.places == (0, 0, 1)


@pytest.mark.parametrize(
    ("names", "reason", "field"),
    [
        (["fc", "fc"], ErrorReason.INVALID_ARGUMENT, "outputs[1].name"),
        (["x" * 2000], ErrorReason.INVALID_ARGUMENT, "outputs[0].name"),
        (["fc:quantiles"], ErrorReason.INVALID_ARGUMENT, "outputs[0].name"),
        (["fc:histogram"], ErrorReason.INVALID_ARGUMENT, "outputs[0].name"),
        (["fc:argmax_channel:channel"], ErrorReason.INVALID_ARGUMENT, "outputs[0].name"),
        (["fc", "layer4[["], ErrorReason.INVALID_SELECTOR, "outputs[1].name"),
        ([":mean"], ErrorReason.INVALID_SELECTOR, "outputs[0].name"),
        ([""], ErrorReason.INVALID_SELECTOR, "outputs[0].name"),
        (["fc"] * 300, ErrorReason.INVALID_ARGUMENT, "outputs"),
    ],
)
def test_what_is_wrong_is_named(names: list[str], reason: ErrorReason, field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read(*names)
    assert (caught.value.reason, caught.value.details["field"]) == (reason, field)
