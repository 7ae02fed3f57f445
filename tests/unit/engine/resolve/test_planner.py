"""Names, duplicates and the size of the reply, before anything is computed."""

import pytest

from tests.support.models.tiny_models import Plain
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import TapRequest
from trocar_server.engine.resolve.planner import Resolved, resolve_taps
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
from trocar_server.tensors.stats import Scope, Statistic

RECORDING = recorded(Plain, (2, 3, 8, 8))
CONV_BYTES = 2 * 4 * 8 * 8 * 4


def tap(selector: str, **options: object) -> TapRequest:
    return TapRequest(parse_selector(selector), **options)  # type: ignore[arg-type]


def resolved(*taps: TapRequest, limit: int = 1 << 20) -> Resolved:
    return resolve_taps(taps, RECORDING, limit)


def refused(*taps: TapRequest, limit: int = 1 << 20) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        resolved(*taps, limit=limit)
    return caught.value


def names(plan: Resolved) -> list[str]:
    return [target.target.name for target in plan.targets]


def test_targets_come_by_tap_and_then_in_execution_order() -> None:
    assert names(resolved(tap("fc"), tap("conv*"))) == ["fc", "conv", "conv2"]


def test_expansions_follow_the_order_of_the_request() -> None:
    assert resolved(tap("fc"), tap("relu@*")).expansions == (("fc",), ("relu@0", "relu@1"))


def test_an_alias_takes_the_place_of_the_name() -> None:
    plan = resolved(tap("fc", alias="logits"))
    assert names(plan) == ["logits"]
    assert plan.expansions == (("logits",),)


def test_an_alias_of_several_values_is_refused() -> None:
    error = refused(tap("relu@*", alias="r"))
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert "'relu@*' stands for 2" in error.message


def test_a_pattern_that_stands_for_one_value_may_have_an_alias() -> None:
    assert names(resolved(tap("**:Linear", alias="head"))) == ["head"]


@pytest.mark.parametrize(
    "taps",
    [
        (tap("fc", alias="x"), tap("conv", alias="x")),
        (tap("fc", alias="conv"), tap("conv")),
        (tap("conv"), tap("fc", alias="conv")),
        (tap("fc", alias="relu@0"), tap("relu@*")),
        (tap("fc"), tap("fc", statistics=(Statistic.MEAN,))),
        (
            tap("fc", statistics=(Statistic.MEAN,), scope=Scope.ALL),
            tap("fc", statistics=(Statistic.MEAN,), scope=Scope.SAMPLE),
        ),
    ],
)
def test_one_name_for_two_things_is_refused(taps: tuple[TapRequest, ...]) -> None:
    assert refused(*taps).reason is ErrorReason.DUPLICATE_NAME


def test_the_same_value_asked_for_twice_comes_once() -> None:
    plan = resolved(tap("conv"), tap("conv*"), tap("conv@0"))
    assert names(plan) == ["conv", "conv2"]
    assert plan.expansions == (("conv",), ("conv", "conv2"), ("conv",))
    assert plan.byte_count == 2 * CONV_BYTES


def test_one_value_may_come_under_two_names() -> None:
    assert names(resolved(tap("fc"), tap("fc", alias="logits"))) == ["fc", "logits"]


def test_bytes_are_those_of_the_values_wanted() -> None:
    mean = (Statistic.MEAN,)
    assert resolved(tap("conv"), tap("conv2", values=False, statistics=mean)).byte_count == CONV_BYTES


@pytest.mark.parametrize(("limit", "fits"), [(CONV_BYTES, True), (CONV_BYTES - 1, False)])
def test_the_limit_of_a_reply_is_exact(limit: int, fits: bool) -> None:
    if fits:
        assert resolved(tap("conv"), limit=limit).byte_count == limit
    else:
        assert refused(tap("conv"), limit=limit).reason is ErrorReason.REPLY_TOO_LARGE


def test_a_reply_that_is_too_large_is_told_by_its_bytes_and_largest_value() -> None:
    error = refused(tap("fc"), tap("conv"), limit=100)
    assert error.details == {"byte_count": str(CONV_BYTES + 2 * 5 * 4), "limit": "100"}
    assert "'conv'" in error.message


def test_statistics_without_values_are_never_too_large_as_values() -> None:
    assert resolved(tap("conv", values=False, statistics=(Statistic.MEAN,)), limit=1).byte_count == 0


def test_statistics_count_towards_the_reply() -> None:
    """Ten float64 per row of an image; with a million rows they would not fit any message."""
    recording = recorded(Plain, (2, 3, 600, 500))
    wanted = tap("conv", values=False, statistics=tuple(Statistic), scope=Scope.CHANNEL, channel_dim=2)
    statistics_bytes = 600 * len(Statistic) * 8
    with pytest.raises(ServiceError) as caught:
        resolve_taps([wanted], recording, statistics_bytes - 1)
    assert caught.value.reason is ErrorReason.REPLY_TOO_LARGE


@pytest.mark.parametrize(
    ("scope", "channel_dim"), [(Scope.CHANNEL, 2), (Scope.CHANNEL, -3), (Scope.CHANNEL, 1 << 20)]
)
def test_a_channel_dimension_that_does_not_exist_is_refused_before_the_pass(
    scope: Scope, channel_dim: int
) -> None:
    error = refused(tap("fc", statistics=(Statistic.MEAN,), scope=scope, channel_dim=channel_dim))
    assert error.reason is ErrorReason.INVALID_ARGUMENT
