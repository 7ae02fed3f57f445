"""The generator draws every field of a request: a new one of the protocol must be drawn, or named here."""

from pathlib import Path
from random import Random

from tests.relations.draw_taps import Rules
from tests.relations.families import FAMILIES
from tests.relations.fields import every_field, fields_of
from tests.relations.processed import KINDS, drawn_messages
from tests.relations.requests import draw_inputs, draw_request

NOT_YET = {
    "texts and images in one chat": ("ChatMessage.parts", "ChatPart.image", "ChatPart.text", "TextSpan.role"),
    "needs something that is stored": ("Edit.stored", "ExtractRequest.adapter"),
    "needs a stored direction: tests/integration/directions": (
        *("DirectionCap.high", "DirectionCap.low", "DirectionSteer.alpha", "DirectionSteer.is_relative"),
        *(
            "DirectionSteer.keeps_norm",
            "DirectionEdit.cap",
            "DirectionEdit.name",
            "DirectionEdit.project_out",
        ),
        *("DirectionEdit.steer", "DirectionEdit.units", "DirectionUnits.DIRECTION_UNITS_NORM"),
        *("DirectionUnits.DIRECTION_UNITS_RAW", "Edit.direction", "Gate.above", "Gate.below"),
        *("Gate.direction", "Gate.place", "Positions.when", "ReadoutReduction.is_pooled"),
        *("ReadoutReduction.name", "Reduction.readout"),
    ),
    "of generated texts alone: tests/integration/generation": ("Positions.generated",),
    "of causal models alone: tests/integration/generation": (
        "ClassScore.positions",
        "LensReduction.top_k",
        "Reduction.lens",
        "ValueScore.positions",
    ),
    "of training alone": ("Loss.class_weights",),
    "no family has flags": ("Flag.boolean", "Flag.integer", "Flag.text", "Input.flag"),
    "no family takes samples of different sizes": ("Input.tensors", "TensorList.tensors"),
    "no family takes or makes them": (
        *("Dtype.DTYPE_COMPLEX128", "Dtype.DTYPE_COMPLEX64"),
        *("Dtype.DTYPE_INT16", "Dtype.DTYPE_INT32", "Dtype.DTYPE_UINT8"),
    ),
    "no family has two tokenizers or templates": ("SpanReduction.is_decoder", "TextBatch.template"),
    "the way `start_at` adds it": ("ExtractRequest.start_at", "ExtractRequest.start_inputs"),
    "the ways `stream` and `cached` change it": ("Execution.cache",),
    "the client leaves it unset": (
        *("EditOrder.EDIT_ORDER_BEFORE_TAPS", "Priority.PRIORITY_NORMAL"),
        "StatisticScope.STATISTIC_SCOPE_ALL",
    ),
    "patterns, functions and graphs stand for several values": (
        *("SelectorKind.SELECTOR_KIND_FUNCTION", "SelectorKind.SELECTOR_KIND_FX"),
        *("SelectorKind.SELECTOR_KIND_PATTERN", "SelectorKind.SELECTOR_KIND_REGEX"),
        *("SelectorParts.is_every_call", "SelectorParts.type"),
    ),
    "no family has names of classes: tests/integration/surgery/test_class_names.py": (
        "ClassScore.class_names",
    ),
    "objectives are at the value that was drawn, or at the output": ("ClassScore.selector",),
}
"""What no request has yet, by the reason."""


def test_every_field_is_drawn(tmp_path: Path) -> None:
    drawn: set[str] = set()
    for name in ("bert-classes", "resnet", "timm-vit", "tuple", "albert"):
        for number in range(150):
            chance = Random(number)
            request = draw_request(chance, name, Rules())
            drawn |= fields_of(request.message(FAMILIES[name], draw_inputs(chance, FAMILIES[name], Rules())))
    for name in KINDS:
        for number in range(12):
            for message in drawn_messages(name, Random(number), tmp_path):
                drawn |= fields_of(message)
    missing = {field for fields in NOT_YET.values() for field in fields}
    assert sorted(every_field() - drawn) == sorted(missing)
