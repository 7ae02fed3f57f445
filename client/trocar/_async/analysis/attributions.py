"""Attributions with asyncio: the parts of an input that contribute to a class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._analysis.analysis_inputs import check_batch_size
from trocar._async.analysis import attribution_passes
from trocar._attribution.attribution_objectives import INPUT
from trocar._attribution.methods import AT_INPUT_ONLY, method_options
from trocar._attribution.place import KnownPlaces
from trocar._request.objectives import as_objective

if TYPE_CHECKING:
    from typing import Any

    from trocar._async.extraction import AsyncExtraction
    from trocar._async.models import AsyncModels
    from trocar._attribution.attribution import Attribution
    from trocar._attribution.cam import Grid
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective


class AsyncAttributions:
    """Methods of attribution, all made of extractions.

    Args:
        extraction: Makes the passes.
        models: Describes the model: preprocessing and categories.
    """

    def __init__(self, extraction: AsyncExtraction, models: AsyncModels) -> None:
        self._extraction = extraction
        self._models = models
        self._places = KnownPlaces()

    async def attribute(
        self,
        /,
        model_id: str,
        inputs: Inputs,
        method: str,
        *,
        of: Objective | None = None,
        at: str | None = None,
        batch_size: int = 16,
        **options: Any,
    ) -> Attribution:
        """Return how much each element of the input, or of a feature map, contributes to a class.

            result = await client.attribute("resnet50", "cat.jpg", "integrated_gradients", steps=50)
            result.values                    # (1, 3, 224, 224)
            result.plot("cat.png")

        | method | result |
        |---|---|
        | `saliency` | the gradient |
        | `input_x_gradient` | the value times its gradient |
        | `integrated_gradients` | (input - baseline) times the mean gradient along the path between them |
        | `smoothgrad` | the mean of one of these three over noisy copies of the inputs |
        | `grad_cam`, `grad_cam_plus_plus` | a map of a module's positions |
        | `layer_conductance` | the flow through each element of a module's value, along the same path |
        | `guided_backprop` | the gradient, with only its positive parts at each ReLU |
        | `occlusion` | the drop of the score when a window of the input is replaced |

        The methods are those of captum and pytorch-grad-cam. Several passes are sent in one stream.

        Args:
            model_id: The id of a loaded model with one input.
            inputs: A batch: an array (batch, ...), unchanged, or images as in `extract`.
            method: The name of the method.
            of: The score, for example `trocar.logit(207)`, or `trocar.logit([207, 3])` with a class for each
                sample. When None, the logit of each sample's most likely class, after one more pass.
            at: The selector of the value that gets the attribution. When None, the model's input; for class
                activation maps and `layer_conductance` the last feature map with height and width before the
                pooling, and for a ViT the tokens before the last attention, as a grid. The result's `at`
                tells which. `integrated_gradients`, smoothgrad over it, and `occlusion` always use
                the input.
            batch_size: The maximum number of samples in one of many passes. Methods of one pass take the
                whole batch.
            **options: Options of the method:
                `abs=True` of saliency: absolute values.
                `baseline=0` of integrated_gradients, layer_conductance and occlusion: a number, or an array
                that is broadcast to the model's inputs after preprocessing, in which 0 is a mean colour.
                `steps=50` of integrated_gradients and layer_conductance: points of the Gauss-Legendre rule.
                `delta=False` of the same: whether to return the convergence delta.
                `over="saliency"`, `samples=25`, `sigma=1.0` and `seed=0` of smoothgrad: the method, the
                number of copies, the noise's standard deviation in units of the inputs; and the method's
                own options.
                `channel_dim=None` of the maps and layer_conductance: the dimension of the channels; where
                the model has them when None.
                `grid=None` of the same: tokens to positions: (height, width) of the last ones, or a
                function from (batch, tokens, width) to (batch, channels, height, width); when None, the
                rows and columns of the patches that the model makes.
                `relus="**:ReLU"` of guided_backprop: selectors. A ReLU that is a function, not a module, is
                not included, and its gradient is unchanged, as in captum.
                `window` and `stride` of occlusion: a size along height and width and a distance, or one for
                each dimension of a sample; by default a 14th of the input, and half of that.

        Returns:
            Values, classes, scores and heat maps; plots.

        Raises:
            ValueError: There is no such method, an option is out of range or does not fit the inputs, the
                method cannot have this objective, or `at` is None and no place suits.
            TypeError: The method has no such option, or the model's input is not a single array of floats.
            NotDifferentiableError: There is no gradient at this place.
            TrocarError: As `extract` and `gradients`.
        """
        check_batch_size(batch_size)
        chosen = method_options(method, options)
        if isinstance(getattr(chosen, "over", chosen), AT_INPUT_ONLY) and at not in (None, INPUT):
            name = f"{method} over {options['over']}" if "over" in options else method
            raise ValueError(f"{name} attributes to the model's input; at={at!r} is not used")
        wanted = None if of is None else as_objective(of)
        model = await self._models.model(model_id)
        return await attribution_passes.attribute(
            self._extraction, model, inputs, method, chosen, wanted, at, batch_size, self._places
        )

    async def grad_cam(
        self,
        model_id: str,
        images: Inputs,
        at: str | None = None,
        of: Objective | None = None,
        *,
        plus_plus: bool = False,
        channel_dim: int | None = None,
        grid: Grid = None,
    ) -> Attribution:
        """Return which parts of an image contribute to a class: Grad-CAM, or Grad-CAM++.

            cam = await client.grad_cam("resnet50", "cat.jpg")
            cam.at                           # "layer4"
            cam.heatmap                      # (1, 224, 224), from 0 to 1
            cam.plot("cam.png")

        relu(sum of channels x mean gradient), of Selvaraju et al. 2017; the numbers equal those of
        pytorch-grad-cam.

        Args:
            model_id: The id of a loaded model with one input.
            images: A batch of images as in `extract`, or an array (batch, channels, height, width),
                unchanged.
            at: The selector of the feature map, one value. When None, the last one with height and width
                before the pooling; for a ViT the last `ln_1`, because only the class token is used after it.
            of: The score; when None, the logit of each sample's most likely class, after one more pass.
            plus_plus: Whether channels are weighted as in Chattopadhyay et al. 2018.
            channel_dim: The dimension of the channels; where the model has them when None.
            grid: The conversion of tokens to positions, see `attribute`.

        Returns:
            `values` (batch, h, w), not scaled; `heatmap` from 0 to 1, of the input's size.

        Raises:
            ValueError: The value has no positions, its tokens do not form a grid, or `at` is None and no
                place fits; the message names places.
            TypeError: The model has several inputs.
            NotDifferentiableError: There is no gradient at this place.
            TrocarError: As `extract` and `gradients`.
        """
        method = "grad_cam_plus_plus" if plus_plus else "grad_cam"
        return await self.attribute(
            model_id, images, method, of=of, at=at, channel_dim=channel_dim, grid=grid
        )
