"""Output rows, from the result of a batch; the handling of failures is decided here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np

from trocar._base.call_options import CallOptions
from trocar._base.tensors import Array
from trocar._export import sample_batches as cutting
from trocar._export.decoding import Loaded
from trocar._export.open_shard import Failure, Rows
from trocar._export.options import Options
from trocar._export.output_folder import Output
from trocar._export.ragged import ANY, RaggedRows, ragged_axes, rows_without_padding
from trocar._export.results import FAULTS_OF_DATA, Outcome
from trocar._export.sample_batches import Batch
from trocar._export.schema import Column, Schema, check_rows, schema_of
from trocar._request.inputs import with_flags
from trocar.errors import OutputError, SourceError, TrocarError

if TYPE_CHECKING:
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps
    from trocar._sync.client import Client

Part: TypeAlias = Mapping[str, Array | RaggedRows]
"""Rows by column."""

_IMAGE = re.compile(r"image (\d+): ")
"""How the server's message begins where it is about one image of a batch."""
_SAMPLE = re.compile(r"(image|text|clip) (\d+)\b")
_SKIP_HINT = "--on-error skip omits such samples and lists them in the manifest"


class RowMaker:
    """Converts outcomes to rows, for one output.

    With on_error="skip" the readable samples of a batch that failed are sent again, one by one, and
    what fails then has no row. That depends on the batch alone, so a run that was stopped and one that
    was not skip the same.
    """

    def __init__(
        self,
        client: "Client",
        model_id: str,
        taps: "Sequence[str | Tap]",
        options: Options,
        output: Output,
    ) -> None:
        self._client = client
        self._model_id = model_id
        self._taps = taps
        self._options = options
        self._output = output

    def of(self, outcome: Outcome) -> Rows:
        """Return the rows of a batch.

        Raises:
            SourceError: A sample cannot be read, and failures are not skipped.
            OutputError: The feature maps have no row for each sample, or other rows than earlier batches.
            TrocarError: The batch failed, and not because of its data, or failures are not skipped.
        """
        batch = outcome.batch
        if self._options.on_error == "stop":
            _check(outcome)
        failed = [_failure(sample, sample.error) for sample in batch.samples if sample.error is not None]
        if outcome.maps is not None:
            parts, misfits = self._fitting(batch.readable, outcome.maps)
        elif outcome.error is None or isinstance(outcome.error, (*FAULTS_OF_DATA, SourceError)):
            parts, misfits = self._one_by_one(batch.readable)
        else:
            _stop(outcome.error, batch)
        failed = sorted([*failed, *misfits], key=lambda failure: failure.index)
        kept = [sample for sample in batch.readable if sample.index not in {f.index for f in failed}]
        return Rows(len(batch.samples), [sample.key for sample in kept], _joined(parts), failed)

    def _fitting(self, samples: Sequence[Loaded], maps: "FeatureMaps") -> tuple[list[Part], list[Failure]]:
        """Return the arrays of samples, or their failures if the shape differs from other rows."""
        name = Batch(samples).name
        try:
            check_rows(maps, len(samples))
            if self._output.schema is None:
                options = self._options
                axes = ragged_axes(self._client, self._model_id, self._taps, maps, options.flags)
                self._output.start(schema_of(maps, axes))
        except OutputError as error:
            error.add_note(f"while extracting {name}")
            raise
        assert self._output.schema is not None
        mismatch = self._output.schema.mismatch(maps)
        if mismatch is None:
            return [_rows(maps, self._output.schema)], []
        if self._options.on_error == "stop":
            misfit = OutputError(f"{name}: {mismatch}")
            misfit.add_note(_SKIP_HINT)
            raise misfit
        return [], [_failure(sample, OutputError(mismatch)) for sample in samples]

    def _one_by_one(self, samples: Sequence[Loaded]) -> tuple[list[Part], list[Failure]]:
        parts: list[Part] = []
        failed: list[Failure] = []
        for sample in samples:
            try:
                maps = self._client.extract(
                    self._model_id,
                    with_flags(cutting.inputs([sample]), self._options.flags),
                    self._taps,
                    edits=self._options.edits,
                    options=CallOptions(numerics=self._options.numerics, timeout_s=self._options.timeout_s),
                    adapter=self._options.adapter,
                )
            except FAULTS_OF_DATA as error:
                failed.append(_failure(sample, error))
                continue
            except TrocarError as error:
                _stop(error, Batch([sample]))
            result, misfits = self._fitting([sample], maps)
            parts += result
            failed += misfits
        return parts, failed


def _check(outcome: Outcome) -> None:
    """Raise the first failure of a batch, which stops the run."""
    for sample in outcome.batch.samples:
        if sample.error is not None:
            error = SourceError(f"{sample.key}: {_message(sample.error)}")
            error.add_note(_SKIP_HINT)
            raise error from sample.error
    if outcome.error is not None:
        if isinstance(outcome.error, FAULTS_OF_DATA):
            _name_image(outcome.error, outcome.batch)
            outcome.error.add_note(_SKIP_HINT)
        _stop(outcome.error, outcome.batch)


def _stop(error: Exception, batch: Batch) -> NoReturn:
    error.add_note(f"while extracting {batch.name}")
    raise error


def _name_image(error: TrocarError, batch: Batch) -> None:
    """Add the sample's key to a server's error about "image 3", "text 3" or "clip 3"."""
    match = _SAMPLE.match(str(error))
    if match and int(match[2]) < len(batch.readable):
        error.add_note(f"{match[1]} {match[2]} is {batch.readable[int(match[2])].key}")


def _failure(sample: Loaded, error: Exception) -> Failure:
    reason = getattr(error, "reason", None) or type(error).__name__
    return Failure(sample.index, sample.key, str(reason), _message(error))


def _message(error: Exception) -> str:
    """Return an error's message, never empty: some exceptions have no text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _IMAGE.sub("", str(error)) or type(error).__name__


def _rows(maps: "FeatureMaps", schema: Schema) -> Part:
    """Return the rows of a batch by column, without the padding of those that differ in size."""
    return {column.name: _own_rows(maps, column) for column in schema.columns}


def _own_rows(maps: "FeatureMaps", column: Column) -> Array | RaggedRows:
    if not column.is_ragged:
        return maps[column.name]
    axes = [axis for axis, size in enumerate(column.row_shape) if size == ANY]
    return rows_without_padding(maps, column.name, axes)


def _joined(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    names: Iterator[str] = iter(parts[0]) if parts else iter(())
    return {name: _concatenated([part[name] for part in parts]) for name in names}


def _concatenated(rows: Sequence[Array | RaggedRows]) -> Array | RaggedRows:
    ragged = [each for each in rows if isinstance(each, RaggedRows)]
    if ragged:
        return RaggedRows.joined(ragged)
    return np.concatenate([each for each in rows if not isinstance(each, RaggedRows)])
