"""Planted faults: one for each relation, which must fail on it.

Each is a small change of the code while a test runs, as somebody might have written it by mistake.
"""

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.relations.family import Family
from trocar._request import inputs as inputs_module
from trocar._request import texts
from trocar._sync import extraction, prepared
from trocar._wire import requests
from trocar_server import models
from trocar_server.app import local_models
from trocar_server.engine.reply_cache import Key, Question
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.rpc.codec import selector_parts
from trocar_server.rpc.oip import inference_outputs
from trocar_server.rpc.services.stream_service import StreamService
from trocar_server.tensors.reductions.padding import Padding
from trocar_server.tensors.stats import groups
from trocar_server.tensors.stats.accumulator import Accumulator

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        relation: The relation that must see it.
        plant: Puts it into the code.
        family: Where it shows.
        taps: What is tapped.
    """

    relation: str
    plant: Callable[[Patch], None]
    family: str
    taps: tuple[trocar.Tap, ...]


def _padding_counts(patch: Patch) -> None:
    patch.setattr(Padding, "own", lambda self, selector, value, layout: None)


def _first_sample_is_special(patch: Patch) -> None:
    update = Accumulator.update

    def changed(self: Any, value: Any) -> None:
        update(self, torch.cat([1.5 * value[:1], value[1:]]))

    patch.setattr(Accumulator, "update", changed)


def _remembers_the_last_call(patch: Patch) -> None:
    update, last = Accumulator.update, [0.0]

    def changed(self: Any, value: Any) -> None:
        update(self, value + last[0])
        last[0] = float(value.reshape(-1)[0])

    patch.setattr(Accumulator, "update", changed)


def _rows_are_channels(patch: Patch) -> None:
    within = groups._within
    patch.setattr(groups, "_within", lambda rank, dim: 2 if rank == 4 else within(rank, dim))


def _resumes_with_nothing(patch: Patch) -> None:
    resume = StreamStatistics._resume

    def changed(self: Any, taps: Any, checkpoint: bytes) -> None:
        resume(self, taps, checkpoint)
        self._entries.clear()

    patch.setattr(StreamStatistics, "_resume", changed)


def _stream_answers_the_batch_before(patch: Patch) -> None:
    extract, kept = StreamService._extract, []

    async def changed(self: Any, stream: Any, prepared: Any) -> Any:
        kept.append(await extract(self, stream, prepared))
        return kept[max(0, len(kept) - 2)]

    patch.setattr(StreamService, "_extract", changed)


def _prepared_inputs_stay(patch: Patch) -> None:
    patch.setattr(prepared, "copy_payloads", lambda payloads, places: None)


def _key_without_the_request(patch: Patch) -> None:
    def key(self: Question, payload_digest: bytes) -> Key:
        return Key(self, hashlib.sha256(self.model_id.encode() + payload_digest).digest())

    patch.setattr(Question, "key", key)


def _taps(change: Callable[[list[Any]], None]) -> Callable[[Patch], None]:
    """Return a fault of the taps of a request."""

    def plant(patch: Patch) -> None:
        original = requests.wire_taps

        def changed(*given: Any) -> Any:
            taps = original(*given)
            change(taps)
            return taps

        patch.setattr(requests, "wire_taps", changed)

    return plant


def _last_scope_for_all(taps: list[Any]) -> None:
    for tap in taps:
        tap.includes_padding = taps[-1].includes_padding


def _first_padding_for_all(taps: list[Any]) -> None:
    for tap in taps[1:]:
        tap.includes_padding = taps[0].includes_padding


def _extra_taps_count_padding(taps: list[Any]) -> None:
    for tap in taps if len(taps) > 2 else ():
        tap.includes_padding = True


def _positions_are_rounded(patch: Patch) -> None:
    original = inputs_module.wire_inputs

    def changed(inputs: Any, *more: Any) -> Any:
        if isinstance(inputs, tuple):
            inputs = tuple(np.round(each, 1) if each.dtype.kind == "f" else each for each in inputs)
        return original(inputs, *more)

    patch.setattr(requests, "wire_inputs", changed)


def _parts_lose_the_port(patch: Patch) -> None:
    original = selector_parts.selector_text
    patch.setattr(selector_parts, "selector_text", lambda field, parts: original(field, parts).split("/")[0])


def plant_other_copy(patch: Patch) -> None:
    """Let local servers host copies with other weights."""
    original = models.make_hosted_copy

    def changed(module: Any) -> Any:
        module = deepcopy(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01)
        return original(module)

    patch.setattr(local_models, "make_hosted_copy", changed)


def _start_is_rounded(patch: Patch) -> None:
    original = requests.extract_call

    def changed(model_id: Any, inputs: Any, taps: Any, chunk: Any, start: Any, *more: Any) -> Any:
        if start.at:
            inputs = np.round(inputs, 2)
        return original(model_id, inputs, taps, chunk, start, *more)

    patch.setattr(extraction, "extract_call", changed)


def _inferred_is_negative(patch: Patch) -> None:
    original = inference_outputs._output

    def changed(name: Any, one: Any, entry: Any) -> Any:
        described, data = original(name, one, entry)
        return described, (-np.frombuffer(data, np.float32)).view(np.uint8).data

    patch.setattr(inference_outputs, "_output", changed)


def _texts(change: Callable[[Any, int], None]) -> Callable[[Patch], None]:
    """Return a fault of texts, which gets each text and its number among all that are sent."""

    def plant(patch: Patch) -> None:
        original, numbers = texts.text_entry, count()

        def changed(sample: Any) -> Any:
            entry = original(sample)
            change(entry, next(numbers))
            return entry

        patch.setattr(texts, "text_entry", changed)

    return plant


def _lose_a_word(entry: Any, _: int) -> None:
    if len(entry.words.words) > 1:
        entry.words.words.pop()


def _first_of_three_is_special(entry: Any, number: int) -> None:
    if number % 3 == 0 and entry.text:
        entry.text = "cat cat cat"


TEXTS = {"forms": _texts(_lose_a_word), "order": _texts(_first_of_three_is_special)}
"""Faults of texts in batches of three, by the relation of `processed.py` that must see them."""


def plant_other_weights(patch: Patch) -> None:
    """Let every model that is built from now on have other weights."""
    original = Family.build

    def changed(self: Family) -> Any:
        module = original(self)
        for parameter in module.parameters():
            parameter.add_(0.01)
        return module

    patch.setattr(Family, "build", changed)


_MEAN: Any = {"stats": ["mean"], "values": False}
_BERT = "bert.encoder.layer.1.output"
_COUNTED = trocar.tap(_BERT, over="sample", **_MEAN)
_WITH_PADDING = trocar.tap("bert.encoder.layer.0.output", over="sample", padding=True, **_MEAN)
_TAGS = trocar.tap("second")
PLANTED = [
    Planted("alone", _padding_counts, "bert", (trocar.tap(_BERT, stats=["count"], over="sample"),)),
    Planted("order", _first_sample_is_special, "tagger", (trocar.tap("second", over="sample", **_MEAN),)),
    Planted("company", _remembers_the_last_call, "bert", (_COUNTED,)),
    Planted("length", _rows_are_channels, "resnet", (trocar.tap("conv1", over="channel", **_MEAN),)),
    Planted("split", _resumes_with_nothing, "bert", (trocar.tap(_BERT, **_MEAN),)),
    Planted("stream", _stream_answers_the_batch_before, "tagger", (_TAGS,)),
    Planted("prepared", _prepared_inputs_stay, "tagger", (_TAGS,)),
    Planted("cached", _key_without_the_request, "tagger", (_TAGS,)),
    Planted("beside", _taps(_extra_taps_count_padding), "bert", (_COUNTED,)),
    Planted("reversed", _taps(_last_scope_for_all), "bert", (_COUNTED, _WITH_PADDING)),
    Planted("singly", _taps(_first_padding_for_all), "bert", (_WITH_PADDING, _COUNTED)),
    Planted("position", _positions_are_rounded, "tagger", (_TAGS,)),
    Planted("parts", _parts_lose_the_port, "tagger", (trocar.tap("second/in"),)),
    Planted("local", plant_other_copy, "tagger", (_TAGS,)),
    Planted("start_at", _start_is_rounded, "tagger", (_TAGS,)),
    Planted("open_inference", _inferred_is_negative, "tagger", (_TAGS,)),
]
"""One fault for each relation of this process; `gateway` has a test of its own."""
