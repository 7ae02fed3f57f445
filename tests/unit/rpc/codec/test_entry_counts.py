"""Lists that are too long: refused by their length, before millions of entries become objects."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import (
    dataset_pb2,
    fit_pb2,
    position_pb2,
    reduction_pb2,
    statistics_pb2,
    tap_pb2,
    trainer_pb2,
)
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.statistics_pb2 import STATISTIC_HISTOGRAM, STATISTIC_MEAN, STATISTIC_QUANTILES
from trocar_server.config import Limits
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec import (
    positions,
    processor_inputs,
    reductions,
    selector_parts,
    statistics,
    tap_requests,
    trainer_specs,
)
from trocar_server.rpc.services import dataset_service

LIMITS = Limits(max_text_characters=10)
CHAT, IDS, WORDS = pb.Chat, pb.TokenIds, pb.WordList


def texts(*entries: pb.TextEntry) -> pb.Input:
    return pb.Input(texts=pb.TextBatch(entries=entries))


def message(parts: int = 0) -> pb.ChatMessage:
    return pb.ChatMessage(role="user", parts=[pb.ChatPart(text="")] * parts)


@pytest.mark.parametrize(
    ("convert", "given", "converter", "reason"),
    [
        (
            lambda given: reductions.reductions_from_wire("reductions", given),
            [reduction_pb2.Reduction(gram=reduction_pb2.GramReduction())] * 17,
            (reductions, "_reduction"),
            ErrorReason.REDUCTION_REJECTED,
        ),
        (
            lambda given: positions.positions_from_wire("positions", given),
            position_pb2.Positions(spans=[reduction_pb2.TextSpan(text="a")] * 257),
            (positions, "span_from_wire"),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            lambda given: selector_parts.selector_text("parts", given),
            tap_pb2.SelectorParts(picks=[tap_pb2.Pick(position=0)] * 342),
            (selector_parts, "_pick"),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            lambda given: tap_requests.tap_request("tap", given),
            tap_pb2.Tap(selector="x", statistics=[STATISTIC_MEAN] * 257),
            (tap_requests, "statistics_problem"),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            lambda given: tap_requests.tap_request("tap", given),
            tap_pb2.Tap(selector="x", statistics=[STATISTIC_QUANTILES], quantiles=[0.5] * 1025),
            (statistics, "StatisticParameters"),
            ErrorReason.INVALID_ARGUMENT,
        ),
        (
            lambda given: tap_requests.tap_request("tap", given),
            tap_pb2.Tap(
                selector="x",
                statistics=[STATISTIC_HISTOGRAM],
                histogram=statistics_pb2.Histogram(edges=range(65_538)),
            ),
            (statistics, "StatisticParameters"),
            ErrorReason.INVALID_ARGUMENT,
        ),
        *(
            (
                lambda given: processor_inputs.to_processor_input("inputs[0]", given, LIMITS, []),
                given,
                (processor_inputs, "_entry"),
                ErrorReason.REQUEST_TOO_LARGE,
            )
            for given in (
                texts(pb.TextEntry(token_ids=IDS(ids=range(11)))),
                texts(*[pb.TextEntry(token_ids=IDS(ids=range(6)))] * 2),
                texts(pb.TextEntry(words=WORDS(words=["a"] * 11))),
                texts(pb.TextEntry(chat=CHAT(messages=[message()] * 11))),
                texts(pb.TextEntry(chat=CHAT(messages=[message(parts=6)] * 2))),
            )
        ),
        (
            dataset_service._manifest,
            dataset_pb2.DatasetManifest(shards=[dataset_pb2.DatasetShard()] * 16_385),
            (dataset_service, "Shard"),
            ErrorReason.DATASET_INVALID,
        ),
        (
            dataset_service._manifest,
            dataset_pb2.DatasetManifest(categories=["a"] * 100_001),
            (dataset_service, "Manifest"),
            ErrorReason.DATASET_INVALID,
        ),
    ],
)
def test_a_long_list_is_refused_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
    convert: Callable[[Any], object],
    given: Any,
    converter: tuple[Any, str],
    reason: ErrorReason,
) -> None:
    converted: list[object] = []
    monkeypatch.setattr(*converter, lambda *arguments, **_: converted.append(arguments))
    with pytest.raises(ServiceError) as caught:
        convert(given)
    assert caught.value.reason is reason
    assert not converted


def test_as_many_items_of_texts_as_characters_are_taken() -> None:
    given = texts(*[pb.TextEntry(token_ids=IDS(ids=range(5)))] * 2)
    assert processor_inputs.to_processor_input("inputs[0]", given, LIMITS, []).row_count == 2


def nested(depth: int, width: int) -> Value:
    """Lists of lists of numbers, each of which is short."""
    if not depth:
        return Value(number_value=1)
    return Value(list_value=ListValue(values=[nested(depth - 1, width)] * width))


def test_lists_within_options_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, option = [], trainer_specs._option

    def counting(*arguments: Any) -> Any:
        counted.append(1)
        return option(*arguments)

    monkeypatch.setattr(trainer_specs, "_option", counting)
    options = Struct(fields={"weight": nested(2, 1000)})
    term = trainer_pb2.LossSpec(name="cross_entropy", options=options)
    with pytest.raises(ServiceError, match="entries") as caught:
        trainer_specs.trainer_spec(trainer_pb2.TrainerSpec(model_id="a", losses=[term]))
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    assert len(counted) < 300_000


def test_a_weight_for_each_class_is_taken() -> None:
    names = ["top_k", "accuracy"]
    metrics = [
        fit_pb2.MetricSpec(name=name, options=Struct(fields={"weights": nested(1, 65_536)})) for name in names
    ]
    found = trainer_specs._checked(fit_pb2.FitSpec(metrics=metrics), ErrorReason.FIT_INVALID)
    assert [len(metric["options"]["weights"]) for metric in found["metrics"]] == [65_536] * 2
