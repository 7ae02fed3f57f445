"""A loaded model at work: replicas and recordings."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from tests.support.models.odd_models import OnlyNegative, Recursive, TakesMany, TellsPaths, TokenModel
from tests.support.models.tiny_models import DataDependent, Plain
from tests.support.servers.footprint import hook_count
from tests.unit.engine.deployments import deployment, hosted, hosted_by_name
from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.deployment import Deployment, make_deployment
from trocar_server.engine.request.plan import Plan, Signature, TapRequest, TensorSignature
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, Recording, parse_selector
from trocar_server.tensors.stats import Scope, Statistic, StatisticParameters


def tensor_signature(*shape: int, dtype: torch.dtype = torch.float32, name: str = "") -> TensorSignature:
    return TensorSignature(name, dtype, (shape,))


async def borrowed(of: Deployment, count: int) -> list[Any]:
    return [replica.module for replica in of.pool.free[:count]]


async def test_replicas_share_their_weights_and_nothing_else() -> None:
    plain = deployment(Plain, (3, 8, 8), replica_count=2)
    first, second = await borrowed(plain, 2)
    original: Any = plain.hosted.module
    assert first is not second
    assert first.conv.weight is second.conv.weight is original.conv.weight
    assert first.conv is not second.conv


async def test_nobody_has_hooks_while_nothing_runs() -> None:
    plain = deployment(Plain, (3, 8, 8))
    (replica,) = await borrowed(plain, 1)
    assert (hook_count(replica), hook_count(plain.hosted.module)) == (0, 0)


def test_a_model_is_recorded_without_data_where_it_can_be() -> None:
    assert deployment(Plain, (3, 8, 8)).example.is_symbolic


def test_a_model_that_looks_at_its_data_is_recorded_with_some() -> None:
    dependent = deployment(DataDependent)
    assert not dependent.example.is_symbolic
    assert dependent.meta is None


def test_detection_models_are_recorded_with_data() -> None:
    model = make_deployment(hosted_by_name("ssdlite320_mobilenet_v3_large"), 1, 1)
    assert not model.example.is_symbolic


def test_a_recording_is_made_for_the_form_that_is_asked_for() -> None:
    recording = deployment(Plain, (3, 8, 8)).record((tensor_signature(5, 3, 16, 16),))
    assert recording.modules["conv"].calls[0].outputs[0].shape == (5, 4, 16, 16)


def test_a_form_is_recorded_once() -> None:
    plain = deployment(Plain, (3, 8, 8))
    first = plain.record((tensor_signature(5, 3, 16, 16),))
    assert plain.record((tensor_signature(5, 3, 16, 16),)) is first
    assert plain.recorded((tensor_signature(5, 3, 16, 16),)) is first
    assert plain.recorded((tensor_signature(6, 3, 16, 16),)) is None


def test_recordings_do_not_pile_up_and_the_last_used_stay() -> None:
    plain = deployment(Plain, (3, 8, 8))
    kept = plain.record((tensor_signature(1, 3, 8, 8),))
    for batch in range(2, 200):
        plain.record((tensor_signature(batch, 3, 8, 8),))
        assert plain.recorded((tensor_signature(1, 3, 8, 8),)) is kept
    assert plain.recorded((tensor_signature(2, 3, 8, 8),)) is None
    assert len(plain.recordings) < 100


def test_a_recording_that_goes_while_it_is_looked_up_is_no_error() -> None:
    """The event loop looks recordings up while the owner thread drops old ones."""

    class DropsWhenAsked(OrderedDict[Signature, Recording]):
        def __contains__(self, key: object) -> bool:
            return super().pop(key, None) is not None  # type: ignore[call-overload]

    plain = deployment(Plain, (3, 8, 8))
    plain.record((tensor_signature(5, 3, 8, 8),))
    plain._recordings = DropsWhenAsked(plain._recordings)
    plain.recorded((tensor_signature(5, 3, 8, 8),))


def test_inputs_that_the_model_cannot_take_are_rejected_with_the_shape_that_it_takes() -> None:
    with pytest.raises(ServiceError, match=r"\(batch, 3, 8, 8\)") as caught:
        deployment(Plain, (3, 8, 8)).record((tensor_signature(1, 4, 8, 8),))
    assert caught.value.reason is ErrorReason.INPUT_REJECTED


def test_a_rejection_names_no_path_of_the_machine() -> None:
    with pytest.raises(ServiceError) as caught:
        deployment(TellsPaths).record((tensor_signature(1, 7),))
    assert "/home/operator" not in caught.value.message
    assert "weights.bin" in caught.value.message


def test_keyword_arguments_are_recorded_by_name() -> None:
    recording = deployment(TakesMany).record((tensor_signature(1, 3), tensor_signature(1, name="scale")))
    assert [leaf.port for leaf in recording.modules[""].calls[0].inputs] == ["in", "in(scale)"]


def test_a_recording_on_data_changes_no_weights_and_leaves_no_hook() -> None:
    model = deployment(OnlyNegative)
    model.record((tensor_signature(4, 3),))
    assert hook_count(model.hosted.module) == 0


def test_a_module_that_calls_itself_can_be_hosted() -> None:
    assert len(deployment(Recursive).example.modules["nested"].calls) == 3


def test_a_model_of_whole_numbers_can_be_hosted() -> None:
    """Its example input is floating point today, so it fails to load."""
    assert "embedding" in deployment(TokenModel, (5,)).example.modules


def test_a_model_that_fails_on_its_example_says_what_to_set() -> None:
    with pytest.raises(ServiceError, match="input_shape") as caught:
        deployment(Plain, (4, 8, 8))
    assert caught.value.reason is ErrorReason.MODEL_INVALID


def test_every_recording_knows_the_stages_of_the_model() -> None:
    staged = make_deployment(hosted(Plain, (3, 8, 8), stages={"stem": "conv"}), 1, max_queue=1)
    assert staged.example.stages == {"stem": "conv"}
    assert staged.record((tensor_signature(2, 3, 9, 9),)).stages == {"stem": "conv"}
    assert staged.record_data(([torch.zeros(1, 3, 8, 8)], {}), PassGuard()).stages == {"stem": "conv"}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"stem": "convv"}, "'stem' does not work: no module 'convv'; nearest: conv"),
        ({"head": "fc:"}, "'head' does not work: selector 'fc:'"),
        ({"stage1": "relu"}, "called 2 times"),
        ({"head": "unused"}, "never calls it"),
        ({"stem": "conv", "all": "stem"}, "'all' does not work: no module 'stem'"),
        ({"fc": "conv"}, "a module of this name exists"),
        ({"stem": "fx:conv9"}, "'stem' does not work: no node 'conv9'; nearest: conv"),
        ({"stem": "fn:softmax"}, "'stem' does not work: no function 'softmax'"),
    ],
)
def test_a_stage_that_the_model_does_not_have_fails_its_loading(stages: dict[str, str], words: str) -> None:
    with pytest.raises(ServiceError) as caught:
        make_deployment(hosted(Plain, (3, 8, 8), stages=stages), 1, max_queue=1)
    assert caught.value.reason is ErrorReason.MODEL_INVALID
    assert words in caught.value.message


def test_a_stage_may_be_a_node_or_a_function() -> None:
    stages = {"stem": "fx:conv", "head": "fn:linear"}
    assert make_deployment(hosted(Plain, (3, 8, 8), stages=stages), 1, max_queue=1).example.stages == stages


def test_a_stage_that_other_data_may_reach_does_not_fail_the_loading() -> None:
    staged = make_deployment(hosted(OnlyNegative, stages={"late_stage": "late"}), 1, max_queue=1)
    assert staged.example.modules["late"].calls == []


def _edges(count: int, alias: str) -> TapRequest:
    parameters = StatisticParameters(edges=tuple(float(edge) for edge in range(count)))
    return TapRequest(
        parse_selector("fc"),
        alias,
        values=False,
        statistics=(Statistic.HISTOGRAM,),
        scope=Scope.ALL,
        parameters=parameters,
    )


def test_requests_that_are_large_themselves_are_not_kept() -> None:
    """A caller could fill the server's memory with them: 10 MB of edges in each of 256."""
    plain = deployment(Plain, (3, 8, 8))
    signature = (tensor_signature(1, 3, 8, 8),)
    recording = plain.record(signature)
    small, large = (_edges(4, "small"),), (_edges(50_000, "large"),)
    many = tuple(TapRequest(parse_selector("**")) for _ in range(250)) * 2
    for taps in (small, large, many):
        plain.resolve(Plan("plain", taps, (), 0), signature, recording, 1 << 30, {})
    assert [key[0] for key in plain._resolved] == [small]
