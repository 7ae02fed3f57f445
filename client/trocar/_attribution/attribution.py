"""Attribution: values, the class they are for, heat maps and plots."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from trocar._attribution.cam import Grid, channels_first
from trocar._attribution.scaling import min_max_scaled, resized, share_scaled
from trocar._base.dimensions import Described
from trocar._base.tables import html_picture
from trocar._base.tensors import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trocar._base.types import Preprocessing

_SHOWN_SAMPLES = 4
_ALPHA = 0.5


@dataclass(frozen=True, eq=False, repr=False)
class Attribution:
    """Contribution of each element to a class; see `Client.attribute` and `Client.grad_cam`.

    cam = client.grad_cam("resnet50", "cat.jpg")
    cam.values.shape                     # (1, 7, 7)
    cam.heatmap.shape                    # (1, 224, 224), from 0 to 1
    cam.plot("cam.png")
    """

    values: Array
    """The attributions, not scaled: of the input's or the feature map's shape; of `grad_cam` and
    `grad_cam_plus_plus` without channels, (batch, height, width)."""
    method: str
    """Its name, for example "integrated_gradients"."""
    at: str
    """What they are attributed to: "/in" for the model's input ("/in(pixel_values)" where images are not the
    first parameter of its forward), or a module's value."""
    model_id: str
    """The model that ran."""
    inputs: Array
    """The model's input, (batch, channels, height, width); of images, as they were preprocessed."""
    classes: tuple[int, ...] | None = None
    """The class of each sample; None where the objective is not about one class."""
    class_names: tuple[str, ...] = ()
    """Their names; empty where the model has none."""
    scores: Array | None = None
    """What the objective gives for each sample, (batch,); None where it is no sum over samples."""
    objective: float | None = None
    """The objective of the whole batch; None where it was not computed."""
    delta: Array | None = None
    """Sum of the attributions - (score of the inputs - score of the baseline), (batch,), where asked for."""
    is_map: bool = False
    """Whether the values have positions only, no channels."""
    channel_dim: int | None = None
    """The dimension of the channels, where it was given."""
    grid: Grid = None
    """How tokens become positions, where it was given."""
    described: Described | None = None
    """What the reply says of the dimensions of the feature map; None of the input's."""
    preprocessing: Preprocessing | None = None
    """What the server does to the images of this model."""

    @cached_property
    def heatmap(self) -> Array:
        """The values as maps from 0 to 1, float32 of shape (batch, height, width), of the input's size.

        For class activation maps as in pytorch-grad-cam: scaled to 0..1, resized bilinearly, and scaled
        again. For other methods the channels are summed and absolute values divided as in captum's pictures:
        by the value below which 98 % of their sum lies.

        Raises:
            ValueError: The model's input is no image, or the values have no positions.
        """
        height, width = self._size()
        if self.is_map:
            maps = self.values
            _check_positions(maps)
            return min_max_scaled(resized(min_max_scaled(maps), height, width)).astype(np.float32)
        maps = channels_first(self.values, self.channel_dim, self.grid, self.described).sum(
            axis=1, dtype=np.float64
        )
        _check_positions(maps)
        scaled = share_scaled(maps)
        same = scaled.shape[1:] == (height, width)
        return (scaled if same else resized(scaled, height, width)).astype(np.float32)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        image: object = None,
        sample: int | None = 0,
        alpha: float = _ALPHA,
    ) -> Figure:
        """Draw the heat map over the image, with a colour bar, the class and its score.

            client.grad_cam("resnet50", "cat.jpg").plot("cam.png")

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            image: The image to draw under it: a path, a PIL image, or pixels (height, width, 3), from which
                the input was made; the heat map covers the area that the server cropped. The model's input
                when None.
            sample: The position of the sample in the batch; a grid of all samples when None.
            alpha: The opacity of the heat map, 0 to 1.

        Returns:
            The matplotlib figure. No display is needed.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
            IndexError: There is no such sample.
            ValueError: There is no heat map, or `image` is given for several samples.
        """
        from trocar._attribution.heat_map_pictures import draw, panel  # needs matplotlib, which is an extra
        from trocar._base.figures import save_figure

        if sample is None and image is not None:
            raise ValueError("several samples: pass sample=, the index of one")
        chosen = range(len(self.values)) if sample is None else [sample]
        figure = draw([panel(self, index, image) for index in chosen], self.title, alpha)
        if path is not None:
            save_figure(figure, path, dpi=120)
        return figure

    @property
    def title(self) -> str:
        """What a picture is called."""
        where = "" if self.at.startswith("/in") else f" at {self.at}"
        return f"{self.method}{where}, {self.model_id}"

    def label(self, sample: int) -> str:
        """Name a sample's class and score, if known: `tabby (281): 12.3`."""
        parts = []
        if self.classes is not None:
            number = self.classes[sample]
            name = self.class_names[sample] if self.class_names else ""
            parts.append(f"{name} ({number})" if name else f"class {number}")
        if self.scores is not None:
            parts.append(f"{float(self.scores[sample]):.4g}")
        return ": ".join(parts)

    def __repr__(self) -> str:
        labels = [self.label(sample) for sample in range(min(len(self.values), _SHOWN_SAMPLES))]
        of = "; ".join(label for label in labels if label)
        more = "; ..." if of and len(self.values) > _SHOWN_SAMPLES else ""
        return f"Attribution({self.title}: {self.values.shape}{' of ' if of else ''}{of}{more})"

    def _repr_html_(self) -> str:
        """Show the picture of the first samples in a notebook; text without a picture or matplotlib."""
        picture = io.BytesIO()
        try:
            from trocar._attribution.heat_map_pictures import draw, panel  # needs matplotlib, an extra

            panels = [panel(self, sample) for sample in range(min(len(self.values), _SHOWN_SAMPLES))]
            draw(panels, self.title, _ALPHA).savefig(picture, format="png")
        except (ImportError, ValueError):
            return f"<p>{escape(repr(self))}</p>"
        return html_picture(picture.getvalue(), repr(self))

    def _size(self) -> tuple[int, int]:
        if self.inputs.ndim != 4:
            raise ValueError(
                f"a heat map needs inputs (batch, channels, height, width), not {self.inputs.shape}; "
                "`values` has the attributions"
            )
        return self.inputs.shape[2], self.inputs.shape[3]


def _check_positions(maps: Array) -> None:
    if maps.ndim != 3 or not maps.size:
        raise ValueError(
            f"a heat map needs values with height and width, not {maps.shape}; `values` has the attributions"
        )
