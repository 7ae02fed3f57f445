"""Where an attribution goes when nobody says it: tables of outputs as passes give them."""

import math
from dataclasses import dataclass, replace

import pytest

from trocar import TokenGrid
from trocar._attribution.place import KnownPlaces, Place, default_place
from trocar._base.types import Model

INPUT = (2, 3, 64, 64)
MODEL = Model(
    model_id="resnet18",
    state="loaded",
    family="classification",
    architecture="resnet18",
    weights="random:0",
    parameter_count=1,
    byte_count=4,
    device="cpu",
    dtype="float32",
    preprocessing=None,
    categories=(),
    input_shape=(3, 64, 64),
)


@dataclass(frozen=True)
class Output:
    name: str
    type: str
    shape: tuple[int, ...]
    pick: str = ""
    axes: tuple[str, ...] = ()
    token_grids: tuple[TokenGrid, ...] = ()

    @property
    def channel_dim(self) -> int | None:
        return self.axes.index("channels") if "channels" in self.axes else None

    @property
    def path(self) -> str:
        return "" if self.name == "/out" else self.name.partition("@")[0].removesuffix(self.pick)


LOGITS = Output("fc", "Linear", (2, 10))
ROOT = Output("/out", "Net", (2, 10))
RESNET = [
    Output("conv1", "Conv2d", (2, 8, 32, 32)),
    Output("layer4.0.relu@0", "ReLU", (2, 16, 2, 2)),
    Output("layer4.0.relu@1", "ReLU", (2, 16, 2, 2)),
    Output("layer4.0", "BasicBlock", (2, 16, 2, 2)),
    Output("layer4", "Sequential", (2, 16, 2, 2)),
    Output("avgpool", "AdaptiveAvgPool2d", (2, 16, 1, 1)),
]
PATCHES = Output("conv_proj", "Conv2d", (2, 12, 8, 8))


TOKENS = ("batch", "height", "channels")


def block(name: str, tokens: int, grid: tuple[int, ...] = (8, 8)) -> list[Output]:
    shape = (2, tokens, 12)
    patches = (TokenGrid(1, grid, tokens - math.prod(grid)),) if grid else ()
    return [
        Output(f"{name}.ln_1", "LayerNorm", shape, "", TOKENS, patches),
        Output(f"{name}.attention.softmax", "Softmax", (2, 4, tokens, tokens)),
        Output(f"{name}.attention[0]", "MultiheadAttention", shape, "[0]", TOKENS, patches),
        Output(f"{name}.mlp", "MLP", shape, "", TOKENS, patches),
        Output(name, "Block", shape, "", TOKENS, patches),
    ]


HEADS = ("batch", "heads", "tokens", "channels")
PROJECTED = Place("conv_proj")
MAP = ("batch", "channels", "height", "width")
MIXER = Output("mixer", "Mixer", (2, 64, 12), "", TOKENS, (TokenGrid(1, (8, 8)),))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RESNET, Place("layer4")),
        (RESNET[:2], Place("layer4.0.relu@0")),
        ([*RESNET[:1], Output("pool", "AdaptiveAvgPool2d", (2, 8, 7, 7))], Place("conv1")),
        ([Output("features.7", "Sequential", (2, 2, 2, 768))], Place("features.7", channel_dim=-1)),
        ([PATCHES, *block("b0", 65), *block("b1", 65)], Place("b1.ln_1")),
        ([PATCHES, *block("b0", 68)], Place("b0.ln_1")),
        ([*block("b0", 65)], Place("b0.ln_1")),
        ([PATCHES, MIXER], Place("mixer")),
        ([PATCHES, *block("b0", 65, ())], Place("conv_proj")),  # tokens of which no patches are known
        ([PATCHES, *block("b0", 65, (4, 4, 4))], Place("conv_proj")),  # of a video
        ([Output("a", "Stage", (2, 9, 7, 4), "", ("batch", "height", "width", "channels"))], Place("a")),
        ([Output("a", "Stage", (9, 7, 2, 4), "", ("height", "width", "batch", "channels"))], Place("a")),
        (
            [PATCHES, Output("b", "Heads", (2, 4, 9, 12), "", HEADS)],
            PROJECTED,
        ),
        ([PATCHES, Output("b", "Bias", (2, 4, 9, 12), "", ("", "", "", ""))], PROJECTED),
        ([*block("b0", 65), Output("neck", "Conv2d", (2, 6, 8, 8))], Place("neck")),
    ],
)
def test_last_feature_map_with_height_and_width(values: list[Output], expected: Place) -> None:
    assert default_place([*values, LOGITS, ROOT], INPUT) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 16, 3, 4), None),
        ((2, 3, 4, 16), -1),
        ((2, 16, 3, 3), None),
        ((2, 16, 16, 16), None),
    ],
)
def test_proportions_of_the_input_tell_where_the_channels_are(
    shape: tuple[int, ...], expected: int | None
) -> None:
    assert default_place([Output("a", "Norm", shape)], (2, 3, 48, 64)).channel_dim == expected


def test_patches_need_not_be_a_square() -> None:
    values = [Output("conv_proj", "Conv2d", (2, 12, 4, 16), "", MAP), *block("b0", 65, (4, 16))]
    assert default_place(values, (2, 3, 32, 128)) == Place("b0.ln_1")


def test_a_map_of_one_position_is_none() -> None:
    values = [Output("layer3", "Sequential", (2, 8, 2, 2)), Output("layer4", "Sequential", (2, 16, 1, 1))]
    assert default_place(values, INPUT).at == "layer3"


def test_without_a_place_the_error_names_values_with_positions() -> None:
    tokens = Output("encoder", "Encoder", (2, 40, 12))
    with pytest.raises(ValueError, match=r'at="encoder", of shape \(2, 40, 12\)'):
        default_place([tokens, LOGITS, ROOT], INPUT)
    with pytest.raises(ValueError, match="no module has positions"):
        default_place([LOGITS, ROOT], INPUT)
    with pytest.raises(ValueError, match='at="layer4"'):
        default_place(RESNET, (2, 64))


def test_a_known_place_is_that_of_the_model_as_it_was_described() -> None:
    known, place = KnownPlaces(), Place("layer4")
    known.keep(MODEL, INPUT, place)
    assert known.find(MODEL, INPUT) == place
    assert known.find(MODEL, (1, 3, 32, 32)) is None
    assert known.find(replace(MODEL, model_id="other"), INPUT) is None
    assert known.find(replace(MODEL, weights="random:1"), INPUT) is None


def test_the_oldest_of_many_known_places_are_forgotten() -> None:
    known = KnownPlaces()
    shapes = [(1, 3, size, size) for size in range(300)]
    for shape in shapes:
        known.keep(MODEL, shape, Place("layer4"))
    assert known.find(MODEL, shapes[0]) is None
    assert known.find(MODEL, shapes[-1]) == Place("layer4")
