"""Samples of a data set by their features, with asyncio: nearest to a query, strongest of a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._analysis.neighbours.nearest_search import check_count
from trocar._analysis.top_inputs.top_input_taps import top_input_taps
from trocar._async.analysis.neighbour_passes import AsyncNeighbourPasses
from trocar._async.analysis.top_input_passes import top_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trocar._analysis.analysis_inputs import AsyncInputSet
    from trocar._analysis.neighbours.metrics import Metric
    from trocar._analysis.neighbours.neighbours import Neighbours
    from trocar._analysis.top_inputs.top_inputs import By, TopInputs
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.models import AsyncModels
    from trocar._request.taps import Tap


class AsyncRetrieval:
    """Samples of a data set by their features.

    Args:
        extraction: Makes the passes.
        models: Describes the model: its preprocessing, for pictures.
    """

    def __init__(self, extraction: AsyncExtraction, models: AsyncModels) -> None:
        self._extraction = extraction
        self._models = models

    async def nearest(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        at: str | Tap,
        query: AsyncInputSet | None = None,
        k: int = 10,
        *,
        vector: object = None,
        metric: Metric = "cosine",
        batch_size: int = 32,
    ) -> Neighbours:
        """Return the k samples of a data set nearest to a query in their features.

            near = await client.nearest("resnet50", "photos/", "avgpool", "cat.jpg", k=5)
            near[0][0].key, near[0][0].distance

        Exact: every sample is compared, in float64, as with faiss' flat indices; of equal distances the
        sample that comes first is the nearer. The data set runs through the model once; the server sends the
        features of a batch, and the client keeps the k nearest, so memory does not grow with the data set. A
        query that is in the data set is its own neighbour. For many searches write the features into a folder
        once (`extract_dataset`) and use `read_features(folder).nearest`.

        Args:
            model_id: The id of a loaded model.
            inputs: The data set: a folder, a list of images or texts, an array, or an iterable of batches;
                see the analysis page.
            at: One feature map. Positions are averaged; for another pooling pass `tap(..., reduce=...)`.
            query: One or more inputs of the same kinds, which run through the same model.
            k: The number of samples for each query, at most the size of the data set.
            vector: Features instead of a query: (features,) or (queries, features).
            metric: "cosine" (distances are 1 - cosine), "euclidean", or "dot": the largest inner products.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            Places, keys and distances, nearest first; prints as a table and draws the samples. Samples with
            NaN or infinities in their features are left out and named.

        Raises:
            ValueError: `k` exceeds the samples, the query is not finite or has another number of features,
                `at` matches several values, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        passes = AsyncNeighbourPasses(self._extraction, self._models, model_id, batch_size)
        return await passes.nearest(inputs, at, (query, vector), k, metric)

    async def top_inputs(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        at: str | Tap,
        channels: int | Iterable[int] | None = None,
        k: int = 9,
        *,
        by: By = "max",
        batch_size: int = 32,
    ) -> TopInputs:
        """Return, for each channel, the k samples of a data set with its largest values, and where in them.

            top = await client.top_inputs("resnet50", "photos/", "layer4", channels=[31], k=9)
            top[31][0].key, top[31][0].place
            top.plot("channel-31.png")

        The data set runs through the model once. The server finds the largest value of each channel over the
        positions, and sends it with its position; the client keeps the k largest, so memory grows with
        channels times k alone. Of equal values the sample that comes first is ranked first.

        Args:
            model_id: The id of a loaded model.
            inputs: The data set: a folder, a list of images or texts, an array, or an iterable of batches;
                see the analysis page.
            at: One feature map with channels.
            channels: Numbers of channels; all when None.
            k: How many samples for each channel; fewer if the data set has fewer.
            by: What is ranked: "max", the largest value over the positions, or "mean", their mean. The
                position is that of the largest value in both.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            Samples by channel, with value and place; prints as a table and draws the crops or the tokens.

        Raises:
            ValueError: `k`, `by` or a channel is out of range, `at` matches several values or one without
                channels, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        taps, count = top_input_taps(at, channels, by), check_count(k)
        return await top_inputs(self._extraction, self._models, model_id, inputs, taps, count, batch_size)
