"""Today's faults: differences that are expected, each until its issue is done.

Each line has a case of its own that must still differ (`test_known.py`): a fault that is mended must leave
this file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import trocar
from tests.relations.draw_taps import channels_of
from tests.relations.families import FAMILIES
from tests.relations.layouts import Place
from tests.relations.replies import Difference

SAMPLE_RELATIONS = ("alone", "order")


@dataclass(frozen=True)
class Known:
    """One fault.

    Attributes:
        name: A word for it.
        issue: The issue that mends it.
        reason: What is wrong.
        relations: The relations that see it.
        covers: Whether a difference of a family is of this kind.
        shown_by: Family and tap of a case that shows it; None if a test of its own does.
    """

    name: str
    issue: int
    reason: str
    relations: tuple[str, ...]
    covers: Callable[[str, Difference], bool]
    shown_by: tuple[str, trocar.Tap] | None

    def excuses(self, relation: str, family: str, difference: Difference) -> bool:
        """Whether a difference is expected."""
        return relation in self.relations and self.covers(family, difference)


def _at(covers: Callable[[str, Place], bool]) -> Callable[[str, Difference], bool]:
    return lambda family, difference: difference.place is not None and covers(family, difference.place)


def _is_statistic(difference: Difference) -> bool:
    return difference.kind not in ("values", "objective", "refusal", "scales")


def _by_chance(family: str, place: Place) -> bool:
    """Whether a value without tokens has as many positions as the texts of the call."""
    if family not in FAMILIES:
        return False
    sizes = {FAMILIES[family].sizes[letter] for letter in FAMILIES[family].masks}
    return not place.lengths and not place.stretched and place.rank == 3 and place.shape[1] in sizes


def _is_of_encoder(family: str, place: Place) -> bool:
    """Whether a value beside a decoder of equal length has the encoder's tokens."""
    return "u" in FAMILIES[family].sizes and "t" in place.lengths


def _is_view_of_one(_: str, difference: Difference) -> bool:
    return "INPUT_REJECTED" in difference.text and "one way" in difference.text


_COUNT = {"stats": ["count", "mean"], "over": "sample", "values": False}
KNOWN = [
    Known(
        "samples are dimension 0",
        40,
        "statistics over samples of time-first values, of `h_n` and of queries are over dimension 0",
        SAMPLE_RELATIONS,
        _at(lambda _, place: place.samples not in (0, None)),
        ("time-first-gru", trocar.tap("cells[0]", **_COUNT)),  # type: ignore[arg-type]
    ),
    Known(
        "equal by chance",
        40,
        "the mask of the text counts at values of another tower with as many positions",
        ("alone", "length"),
        lambda family, difference: (
            difference.place is not None
            and "channels" not in difference.text
            and _by_chance(family, difference.place)
        ),
        ("flava", trocar.tap("image_model.encoder.layer.1.output", **_COUNT)),  # type: ignore[arg-type]
    ),
    Known(
        "channels by rank",
        40,
        "channels are the last dimension of rank 3, otherwise dimension 1: these may be tokens",
        ("length",),
        _at(lambda _, place: channels_of(place) in (*place.lengths.values(), *place.spatial)),
        ("tagger", trocar.tap("second", stats=["mean"], over="channel", values=False)),
    ),
    Known(
        "channels last",
        40,
        "the rows of (samples, rows, columns, width) are taken for the channels",
        ("length",),
        _at(lambda _, place: 1 in place.spatial),
        ("swin", trocar.tap("features.1.1", stats=["mean"], over="channel", values=False)),
    ),
    Known(
        "rank alone",
        40,
        "padding counts at values of tokens that are not (samples, tokens, width)",
        ("alone",),
        lambda _, difference: (
            _is_statistic(difference)
            and difference.place is not None
            and bool(difference.place.lengths or difference.place.stretched)
            and difference.place.rank != 3
        ),
        ("qwen3", trocar.tap("model.layers.1.self_attn.q_norm", **_COUNT)),  # type: ignore[arg-type]
    ),
    Known(
        "keys of cross-attention",
        40,
        "the padding of the encoder's tokens counts in a decoder",
        ("alone",),
        _at(_is_of_encoder),
        ("t5", trocar.tap("decoder.block.0.layer.1.EncDecAttention.k", **_COUNT)),  # type: ignore[arg-type]
    ),
    Known(
        "a cast of one sample",
        39,
        "of one sample, `[:, ..., 0]` as float16 is refused in torch's words of strides",
        ("alone",),
        _is_view_of_one,
        ("tuple", trocar.tap("body.2", index=np.s_[:, ..., 0], cast="float16")),
    ),
    Known(
        "texts and images together",
        40,
        "padding counts where texts and images are one sequence",
        ("alone",),
        _at(lambda family, place: "t" in place.stretched and "pixel_values" in FAMILIES[family].axes),
        ("flava", trocar.tap("multimodal_model.encoder.layer.0.output", **_COUNT)),  # type: ignore[arg-type]
    ),
    Known(
        "frames of sound",
        40,
        "the mask of sound samples is not scaled to frames",
        ("alone",),
        _at(lambda _, place: "s" in place.stretched),
        ("wav2vec2", trocar.tap("wav2vec2.encoder.layers.1", **_COUNT)),  # type: ignore[arg-type]
    ),
]
"""Every fault that the relations show today."""


def unexpected(relation: str, family: str, differences: list[Difference]) -> list[Difference]:
    """Return the differences that no line of `KNOWN` explains."""
    return [
        difference
        for difference in differences
        if not any(known.excuses(relation, family, difference) for known in KNOWN)
    ]
