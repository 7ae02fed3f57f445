"""Export job: a data set through a model, into a folder of shards."""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trocar._base.delegation import explained
from trocar._base.replacement import FILE_SUFFIXES, SAFETENSORS
from trocar._export.decoding import Decoder, client_decoder, keep_encoded
from trocar._export.description import describe
from trocar._export.edit_descriptions import names_in
from trocar._export.memory_source import memory_source
from trocar._export.open_shard import Failure
from trocar._export.options import FormatName, OnError, Options
from trocar._export.output_folder import Output, open_output
from trocar._export.ray_pool import RayPool, Work
from trocar._export.results import Outcome, outcomes_of_samples
from trocar._export.rows import RowMaker
from trocar._export.writers.formats import FORMATS
from trocar._extras import need, need_for_source
from trocar._sources.sample import Source
from trocar._sources.source_opening import Decode, open_source
from trocar.errors import DatasetError, ModelNotLoadedError, OutputError, SourceError, TrocarError

if TYPE_CHECKING:
    from trocar._base.call_options import Numerics
    from trocar._request.edits import Edit
    from trocar._request.taps import Tap
    from trocar._sync.client import Client


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    sample_count: int
    """Samples that are done, those of earlier runs included."""
    total: int | None
    """Samples that there are; None when the source does not say."""
    fraction: float | None
    """The part of the source that is done, 0 to 1; None when the source does not say."""
    failed_count: int


@dataclass(frozen=True)
class DatasetReport:
    """Report of a run; made by `extract_dataset`."""

    out: Path
    """The folder."""
    sample_count: int
    """Samples of the source that are done, those of earlier runs included."""
    row_count: int
    """Rows of every feature map: samples that did not fail."""
    resumed_at: int
    """Samples that earlier runs had done."""
    shard_count: int
    byte_count: int
    """Bytes of all shards."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of every feature map over all shards; -1 for a size that differs from row to row."""
    failed: tuple[Failure, ...]
    """Samples without a row, with the reason; empty unless on_error="skip"."""
    duration_s: float
    """Seconds that this run took."""
    notes: tuple[str, ...]
    """What the source left out."""


@explained
def extract_dataset(  # noqa: PLR0913 - choices that all have a default
    client: "Client",
    model_id: str,
    source: object,
    taps: "str | Tap | Sequence[str | Tap]",
    out: str | os.PathLike[str],
    *,
    edits: "str | Edit | Sequence[str | Edit]" = (),
    format: FormatName = "safetensors",
    batch: int = 16,
    shard_size: int = 10_000,
    decode: Decode = "server",
    on_error: OnError = "stop",
    limit: int | None = None,
    restart: bool = False,
    timeout_s: float | None = None,
    numerics: "Numerics" = "exact",
    adapter: str = "",
    flags: Mapping[str, bool | int | str] | None = None,
    column: str = "",
    max_tokens: int | None = None,
    truncate: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> DatasetReport:
    """Run an entire data set through a model and write feature maps into a folder of shards.

        trocar.extract_dataset(client, "resnet50", "photos/", ["avgpool"], "features/")
        features = trocar.read_features("features/")
        features["avgpool"][:100]            # numpy array (100, 2048, 1, 1)

    Called again after it was stopped in any way, it resumes with the batch after the last one on disk;
    the files are the same as those of a run that was never stopped. Called again after it was done, it
    does nothing. Memory use is a few batches, for any size of the data set.

    Values of tokens are written without the padding of their batch: rows then differ in size, and
    `read_features` returns them one by one. Clips of sound are batched with clips of their length, unless the
    model takes windows of one length, so that none is padded.

    Args:
        client: A connected client.
        model_id: The id of a loaded model.
        source: A folder of images, of `.wav` and `.flac` files or of `.txt` files, such files, `.npy` files,
            tables of texts (`.csv`, `.jsonl`, `.parquet`), WebDataset `.tar` shards,
            "torch:package.module:name", "hf:name-or-path:split:column", or a list of these; or an
            array, texts, sound, a torch dataset (map-style or iterable), a Hugging Face dataset, a list of
            images.
        taps: As in `Client.extract`.
        out: The folder to write to; created if missing.
        edits: Edits of every pass, as in `Client.extract`; without swaps from a source. A run with
            other edits does not resume in the same folder.
        format: "safetensors", "zarr", "parquet" or "npy".
        batch: Samples in one pass.
        shard_size: The most samples in one shard.
        decode: "server", or "client" to decode images here (needs Pillow): less work for the server,
            more bytes to send, and every format that Pillow reads.
        on_error: "stop", or "skip" to leave out samples that cannot be read or that the model does
            not take. The batch of such a sample is sent again one by one.
        limit: How many samples to take; all when None.
        restart: Whether to delete the output in `out` and start over.
        timeout_s: Overrides the client's timeout for each call, in seconds.
        numerics: The loosest numbers that will do, as in `Client.extract`. With others than "exact" the last
            digits depend on what the server has ready: two runs need not give the same files.
        adapter: The name of one of your LoRA adapters on the model, as in `Client.extract`. A run with other
            weights of the same adapter cannot be told apart; use a new folder after training.
        flags: Flags of the model's forward by name, for every pass; see `trocar.flag`.
        column: Which column of a table or Hugging Face dataset, or two of pairs of texts with a comma
            between; the one with a usual name when empty.
        max_tokens: The most tokens of one text; the model's maximum when None.
        truncate: Whether longer texts are cut; otherwise they fail.
        progress: Called after every batch.

    Returns:
        Counts, shapes and failures.

    Raises:
        MissingExtraError: The format, the source or decode="client" needs a library that is not installed;
            nothing was requested of the server or written.
        SourceError: The source, or with on_error="stop" a sample of it, cannot be read.
        OutputError: `out` has the name of a file or other content, or feature maps cannot be written as rows.
        TrocarError: A call failed; see `Client.extract`. Completed work is kept.
        UnknownEditsError: You have stored no edits of a name in `edits` for the model.
        ValueError: An option is out of range.
    """
    options = Options.of(
        edits=edits,
        format=format,
        batch=batch,
        shard_size=shard_size,
        decode=decode,
        on_error=on_error,
        limit=limit,
        restart=restart,
        timeout_s=timeout_s,
        numerics=numerics,
        adapter=adapter,
        flags=flags,
        column=column,
        max_tokens=max_tokens,
        truncate=truncate,
    )
    target, is_zarr = Path(out), format == "zarr"
    known = (*FILE_SUFFIXES, SAFETENSORS) if not is_zarr else {*FILE_SUFFIXES, SAFETENSORS} - {".zarr"}
    if target.suffix in known and not target.is_dir():
        raise OutputError(
            f"{target.name!r} is the name of a file, and a folder of shards is written: {target.stem!r}, say"
        )
    return extract_dataset_with(None, client, model_id, source, taps, out, options, progress)


def extract_dataset_with(
    pool: Callable[[Work], RayPool] | None,
    client: "Client",
    model_id: str,
    source: object,
    taps: "str | Tap | Sequence[str | Tap]",
    out: str | os.PathLike[str],
    options: Options,
    progress: Callable[[Progress], None] | None = None,
) -> DatasetReport:
    """Run an entire data set as `extract_dataset`, on this machine or with a pool of actors.

    Args:
        pool: Makes the pool; None for this machine alone.
        client: See `extract_dataset`, also for `model_id`, `source`, `taps`, `out` and `progress`.
        model_id: See there.
        source: See there.
        taps: See there.
        out: See there.
        options: The others.
        progress: See there.

    Raises:
        TrocarError: See there.
    """
    listed = [taps] if not isinstance(taps, Sequence) or isinstance(taps, str) else list(taps)
    return _Job(client, model_id, listed, options, progress or _silent, pool).run(source, Path(out))


class _Job:
    """One run, with the state shared by its steps."""

    def __init__(
        self,
        client: "Client",
        model_id: str,
        taps: "list[str | Tap]",
        options: Options,
        progress: Callable[[Progress], None],
        make_pool: Callable[[Work], RayPool] | None = None,
    ) -> None:
        self._make_pool = make_pool
        self._client = client
        self._model_id = model_id
        self._taps = taps
        self._options = options
        self._progress = progress

    def run(self, given: object, out: Path) -> DatasetReport:
        started = time.monotonic()
        FORMATS[self._options.format].need()
        memory = memory_source(given)
        for source in given if isinstance(given, (list, tuple)) and memory is None else (given,):
            need_for_source(source)
        if self._options.decode == "client":
            need('decode="client"', "datasets", "PIL.Image")
        model = self._client.model(self._model_id)
        if not model.is_loaded:
            raise ModelNotLoadedError(
                f"model '{model.model_id}' is {model.state}; load it first: "
                f"trocar admin load {model.model_id}"
            )
        server = self._client.server_info()
        options = self._options
        if options.batch > server.limits.max_batch:
            raise DatasetError(
                f"a batch of {options.batch} exceeds the server's limit, {server.limits.max_batch}"
            )
        opened = memory or open_source(
            given, decode=options.decode, sample_rank=len(model.input_shape), column=options.column
        )
        decoder: Decoder = keep_encoded
        if options.decode == "client":
            decoder = client_decoder(server.limits.max_image_pixels)
        stored = self._client.stored_edits(model.model_id) if names_in(options.edits) else ()
        model = self._client.model(self._model_id, has_digest=True)  # takes a while for a large model
        job = describe(model, server, self._taps, opened, options, stored)
        with open_output(out, job, FORMATS[options.format], is_restart=options.is_restart) as output:
            resumed_at = output.position
            if not output.manifest.is_done:
                pool = None
                if self._make_pool is not None:
                    pixels = server.limits.max_image_pixels
                    pool = self._make_pool(self._work(given, len(model.input_shape), pixels))
                self._fill(output, opened, decoder, pool)
            report = _report(output, opened, resumed_at)
        return replace(report, duration_s=time.monotonic() - started)

    def _work(self, given: object, sample_rank: int, max_pixels: int) -> Work:
        """Return what the actors of a pool do."""
        connection = self._client._connection.options
        return Work(
            connection,
            self._model_id,
            self._taps,
            self._options,
            given,
            os.getcwd(),  # noqa: PTH109 - a text
            sample_rank,
            max_pixels,
        )

    def _fill(self, output: Output, source: Source, decoder: Decoder, pool: RayPool | None) -> None:
        """Write every sample that is not on disk yet."""
        total = _total(source, self._options.limit)
        output.complete_if_full()
        self._tell(output, None, total)
        rows = RowMaker(self._client, self._model_id, self._taps, self._options, output)
        try:
            with self._found(source, output.position, decoder, pool) as result:
                for outcome in result:
                    output.append(rows.of(outcome))
                    self._tell(output, outcome.batch.samples[-1].fraction, total)
        except TrocarError as error:
            if output.position:
                error.add_note(f"{output.position} samples are done; run the same command again to resume")
            raise
        if not output.position:
            raise SourceError("the source has no samples")
        output.finish()

    @contextmanager
    def _found(
        self, source: Source, start: int, decoder: Decoder, pool: RayPool | None
    ) -> Iterator[Generator[Outcome]]:
        """Yield the batches from a sample on, with their results."""
        if pool is not None:
            with pool, closing(pool.outcomes(source, start, self._options.limit)) as result:
                yield result
            return
        limit, numbered = self._options.limit, enumerate(source.samples(start), start)
        wanted = numbered if limit is None else islice(numbered, max(0, limit - start))
        with closing(
            outcomes_of_samples(self._client, self._model_id, wanted, self._taps, self._options, decoder)
        ) as result:
            yield result

    def _tell(self, output: Output, fraction: float | None, total: int | None) -> None:
        done = output.position
        if self._options.limit is not None:
            fraction = done / total if total else None
        self._progress(Progress(done, total, fraction, output.failed_count))


def _report(output: Output, source: Source, resumed_at: int) -> DatasetReport:
    known = output.manifest
    columns = known.schema.columns if known.schema else ()
    return DatasetReport(
        out=output.root,
        sample_count=known.sample_count,
        row_count=known.row_count,
        resumed_at=resumed_at,
        shard_count=sum(1 for shard in known.shards if shard.name),
        byte_count=known.byte_count,
        shapes={column.name: (known.row_count, *column.row_shape) for column in columns},
        failed=known.failed,
        duration_s=0.0,
        notes=source.notes,
    )


def _total(source: Source, limit: int | None) -> int | None:
    known = [count for count in (source.count, limit) if count is not None]
    return min(known) if known else None


def _silent(progress: Progress) -> None:
    """Show nothing."""
