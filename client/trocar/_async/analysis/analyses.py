"""Analyses of feature maps on the client, with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._analysis.health import HealthThresholds
from trocar._analysis.ordering import EVERYTHING
from trocar._async.analysis import analysis_passes, rsa_passes
from trocar._base.call_options import CallOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trocar._analysis.analysis_inputs import AsyncInputSet
    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.fid import Fid
    from trocar._analysis.health import Health
    from trocar._analysis.pca import Pca
    from trocar._analysis.similarity.cka import Cka
    from trocar._analysis.similarity.rdms import Compare, Distance
    from trocar._analysis.similarity.rsa import Rsa
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.gradients import AsyncGradients
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap


class AsyncAnalyses:
    """Comparisons and summaries of feature maps.

    Args:
        extraction: Makes the passes.
        gradients: Makes those with gradients.
    """

    def __init__(self, extraction: AsyncExtraction, gradients: AsyncGradients) -> None:
        self._extraction = extraction
        self._gradients = gradients

    async def fid(
        self,
        model_id: str,
        images_a: AsyncInputSet,
        images_b: AsyncInputSet,
        at: str | Tap = "avgpool",
        *,
        batch_size: int = 32,
    ) -> Fid:
        """Return the Frechet distance (FID) between two sets of images, in the features of a model.

            result = await client.fid("resnet50", "real/", "generated/", at="avgpool")
            result.distance

        |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2)) with sample covariances (divided by
        n - 1), of Heusel et al. 2017, in float64. The server computes mean and covariance. Published numbers
        use the Inception weights of 2015 and their own resizing; only compare numbers of the same model and
        the same set size.

        Args:
            model_id: The id of a loaded model.
            images_a: A folder, a list of images or an array of them, or an iterable of batches; at least 2
                images. Use more images than channels; otherwise the distance is biased.
            images_b: The other set.
            at: The place of the features, one value of shape (batch, channels), or with positions, which are
                averaged; for another pooling pass `tap(..., reduce=[trocar.pool("cls")])`.
            batch_size: The maximum number of images in one pass, unless the inputs are batches.

        Returns:
            The distance and its parts; prints as a table.

        Raises:
            ValueError: A set is too small, the features are not finite, or `at` matches several values.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        return await analysis_passes.fid(self._extraction, model_id, (images_a, images_b), at, batch_size)

    async def cka(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap],
        *,
        other: str | None = None,
        other_taps: str | Tap | Sequence[str | Tap] | None = None,
        batch_size: int = 32,
        debiased: bool = False,
    ) -> Cka:
        """Return the linear CKA between modules of one model or of two, over the same inputs.

            cka = await client.cka("resnet50", "photos/", taps=["layer1", "layer2", "layer3", "layer4"])
            cka["layer1", "layer4"]

        <K, L> / (|K| |L|) of the centred Gram matrices of all samples, of Kornblith et al. 2019, in float64;
        exact, not an average over batches. Memory grows with taps times samples squared; the features go
        through temporary files. Pool large feature maps with `tap(..., reduce=...)`.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: Taps of the rows. Every feature map needs one row for each sample.
            other: Another model for the columns; the same one when None.
            other_taps: Taps of the columns; as `taps` when None.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.
            debiased: Estimate without the bias of few samples: CKA from the unbiased HSIC of Song et al.
                2012, as Nguyen et al. 2021 do, on all samples at once. Needs 4 samples.

        Returns:
            The matrix with the names of its rows and columns; prints as a table and plots as a heat map.

        Raises:
            ValueError: There are too few samples, or the feature maps have no row for each sample.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        models, both_taps = (model_id, other or model_id), (taps, other_taps)
        return await analysis_passes.cka(self._extraction, models, inputs, both_taps, batch_size, debiased)

    async def rsa(  # noqa: PLR0913 - options of one analysis, by keyword
        self,
        model_id: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap],
        *,
        other: str | None = None,
        other_taps: str | Tap | Sequence[str | Tap] | None = None,
        rdms: Mapping[str, object] | None = None,
        distance: Distance = "correlation",
        compare: Compare = "spearman",
        batch_size: int = 32,
    ) -> Rsa:
        """Compare how feature maps arrange the same samples: representational similarity analysis (RSA).

            rsa = await client.rsa("resnet50", "photos/", taps=["layer1", "layer4"])
            rsa["layer1", "layer4"], rsa.rdm("layer4").shape

        Kriegeskorte et al. 2008: a matrix of the dissimilarities of all pairs of samples (RDM) for each
        feature map, flattened per sample, and the correlation of two such matrices over the pairs. In
        float64, with the definitions of rsatoolbox. Memory grows with taps times samples squared; the
        features go through temporary files. Pool large feature maps with `tap(..., reduce=...)`.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: Taps of the rows. Every feature map needs one row for each sample.
            other: Another model for the columns; the same one when None.
            other_taps: Taps of the columns; as `taps` when None.
            rdms: More columns: RDMs of your own by name, for example of judgements, (samples, samples).
            distance: Between samples: "correlation" (1 - Pearson's r), "cosine" (1 - cosine), or "euclidean"
                (squared and divided by the number of features).
            compare: Of two RDMs: "spearman", "pearson" or "cosine".
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            The matrix with its names, and all RDMs; prints as a table and plots as a heat map.

        Raises:
            ValueError: There are fewer than 3 samples, the feature maps have no row for each sample, an RDM
                does not fit, or a distance or comparison is unknown.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        models, both_taps = (model_id, other or model_id), (taps, other_taps)
        kinds = (distance, compare)
        return await rsa_passes.rsa(
            self._extraction, models, inputs, both_taps, rdms or {}, kinds, batch_size
        )

    async def dead_channels(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap] = "**",
        *,
        threshold: float = 0.0,
        batch_size: int = 32,
    ) -> DeadChannels:
        """Report channels whose absolute maximum over all inputs does not exceed a threshold.

            report = await client.dead_channels("resnet50", "photos/", taps="**:ReLU")
            report.dead_count

        The server computes the maxima; no values are sent. Channels with a NaN are reported separately.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: Places to check, all by default. Channels are those of statistics with over="channel".
            threshold: Channels whose absolute maximum is at most this count as dead.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            A row for each feature map; prints those with dead or NaN channels as a table.

        Raises:
            ValueError: `threshold` is negative or not finite, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        return await analysis_passes.dead_channels(
            self._extraction, model_id, inputs, taps, threshold, batch_size
        )

    async def diff(  # noqa: PLR0913 - options of one analysis, by keyword
        self,
        model_a: str,
        model_b: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap] = "**",
        *,
        taps_b: str | Tap | Sequence[str | Tap] | Mapping[str, str | Tap] | None = None,
        edits_a: str | Edit | Sequence[str | Edit] = (),
        edits_b: str | Edit | Sequence[str | Edit] = (),
        tolerance: float = 1e-5,
        batch_size: int = 32,
    ) -> Diff:
        """Compare two models on the same inputs, feature map by feature map.

            diff = await client.diff("resnet18", "resnet18-tuned", "photos/", taps="**")
            diff.first_diverging

        Cosine similarity, relative error |a - b| / |a| and largest absolute difference over all elements of
        all samples, in float64. Equal NaN and infinities at the same place count as equal.

        Args:
            model_a: The id of a loaded model.
            model_b: The other model; may be the same id.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: Values to compare, paired by name; values that only one model has are listed.
            taps_b: Selectors of the second model if names differ: a list in the order of `taps`, or a mapping
                from entries of `taps` to their counterparts.
            edits_a: Edits in the first model, as in `extract`.
            edits_b: Edits in the second model; use the same id twice to see the effect of edits.
            tolerance: Relative error up to which feature maps count as equal.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            A row for each feature map, in execution order; prints as a table and plots.

        Raises:
            ValueError: `tolerance` is negative, taps do not pair up, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch and the model.
        """
        models = (model_a, model_b)
        return await analysis_passes.diff(
            self._extraction, models, inputs, (taps, taps_b), (edits_a, edits_b), tolerance, batch_size
        )

    async def fit_pca(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        at: str | Tap,
        k: int,
        *,
        batch_size: int = 32,
    ) -> Pca:
        """Fit the k principal components of a feature map's channels, over all samples and positions.

            pca = await client.fit_pca("resnet50", "photos/", at="layer3", k=16)
            pca.components.shape             # (16, 1024)

        Computed from mean and covariance, which the server computes, by eigendecomposition in float64.
        Variances are divided by n - 1, and signs are as in scikit-learn.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            at: One feature map.
            k: Number of components, at most the smaller of the numbers of channels and vectors.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            Components, mean and explained variance; can be saved and loaded.

        Raises:
            ValueError: `k` is out of range, the features are not finite, or `at` matches several values.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        return await analysis_passes.fit_pca(self._extraction, model_id, inputs, at, k, batch_size)

    async def health(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        inputs: Inputs,
        of: Objective,
        *,
        at: str | Tap | Sequence[str | Tap] = EVERYTHING,
        edits: str | Edit | Sequence[str | Edit] = (),
        vanishing: float = 1e-6,
        exploding: float = 1e3,
        vanishing_ratio: float = 1e-6,
        exploding_ratio: float = 1e3,
        timeout_s: float | None = None,
    ) -> Health:
        """Report how gradients flow through a model: one forward and one backward pass, statistics only.

            health = await client.health("resnet50", images, of=trocar.loss("cross_entropy", labels))
            health.flagged
            health.plot("health.png")

        For every call of every module, the gradient at its output: Euclidean norm, zeros, NaN and infinities;
        the norm of the gradient of the module's own parameters, the norm of these parameters, and the ratio
        of the two. Norms scale with the objective: a loss that is a mean over the batch has smaller gradients
        at outputs than a sum. Values without a gradient are left out.

        A row is flagged `nan` or `inf` if a gradient has such an element, `dead` if one is all zeros, and
        `vanishing` or `exploding` if a norm or the ratio is beyond its threshold.

        Args:
            model_id: The id of a loaded model.
            inputs: As in `extract`: the inputs of one pass.
            of: The objective: a loss, a class, a value.
            at: Places to report, all by default. "layer4" is the gradient at its output, "layer4/in" that at
                its input.
            edits: Changes during the pass, as in `extract`.
            vanishing: Norms below it are flagged, at outputs and of a module's parameters together.
            exploding: Norms above it are flagged.
            vanishing_ratio: Ratios of the parameters' gradient to the parameters below it are flagged.
            exploding_ratio: Ratios above it are flagged.
            timeout_s: Overrides the client's timeout for the pass, in seconds.

        Returns:
            A row for each value, in execution order; prints as a table and plots.

        Raises:
            ValueError: A threshold is negative or not finite, or a lower one is not below the upper one.
            TrocarError: As `gradients`.
        """
        thresholds = HealthThresholds(vanishing, exploding, vanishing_ratio, exploding_ratio)
        passing = {"of": of, "edits": edits, "options": CallOptions(timeout_s=timeout_s)}
        return await analysis_passes.health(
            self._extraction, self._gradients, model_id, inputs, at, thresholds, **passing
        )
