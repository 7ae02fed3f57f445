"""Search in a folder of features: blocks of its rows, and queries through the model that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._analysis.analysis_inputs import Batches, InputSet, batches_of
from trocar._analysis.neighbours.metrics import Metric, check_metric
from trocar._analysis.neighbours.nearest_search import NearestSearch, check_count
from trocar._analysis.neighbours.neighbours import MOST_QUERIES_SHOWN, Neighbours, PictureSources
from trocar._analysis.neighbours.queries import Queries, named_queries, queries_of_vectors, rows_of
from trocar._analysis.sample_inputs import sample_input
from trocar._base.call_options import CallOptions
from trocar._base.names import few, unknown_name
from trocar._export import manifest
from trocar._export.description import described_model, plain
from trocar._export.feature_blocks import rows_at_once
from trocar._export.features import RaggedColumn
from trocar._request.inputs import with_flags
from trocar._request.taps import Tap
from trocar._request.taps import tap as tap_of

if TYPE_CHECKING:
    from trocar._export.features import FeatureColumn, Features
    from trocar._sync.client import Client

_QUERY_BATCH = 16


def search_features(
    features: Features,
    query: Any,
    k: int,
    at: str | None,
    metric: Metric,
    client: Client | None,
    tap: Tap | None,
) -> Neighbours:
    """Search one feature map of a folder; see `Features.nearest`."""
    check_count(k)
    check_metric(metric)
    name = _column_name(features, at)
    column, own_rows, preprocessing = features[name], None, None
    if isinstance(column, RaggedColumn):
        raise ValueError(
            f"rows of {name!r} differ in size, one for each token or frame; extract it again with "
            'tap(..., reduce=trocar.pool("avg")), and search in that folder'
        )
    if client is not None:
        queries, preprocessing = _through_model(features, name, query, client, tap)
    elif isinstance(query, str) or (isinstance(query, (list, tuple)) and query and _all_texts(query)):
        queries, own_rows = _of_samples(features, column, [query] if isinstance(query, str) else query)
    else:
        queries = queries_of_vectors(query, column.shape[1:])
    search = NearestSearch(queries.rows, k, metric, own_rows)
    left_out: list[int] = []
    for block in column.blocks(rows_at_once([column])):
        left_out += search.add(block)
    indices, distances = search.result()
    keys = features.sample_keys
    return Neighbours(
        indices,
        distances,
        tuple(tuple(keys[index] for index in row) for row in indices.tolist()),
        queries.names,
        metric,
        name,
        len(column),
        tuple(keys[row] for row in left_out),
        PictureSources(queries=queries.inputs, preprocessing=preprocessing),
    )


def _column_name(features: Features, at: str | None) -> str:
    """Return the name of a feature map.

    Raises:
        KeyError: The folder has no such feature map.
        ValueError: It has several, and none was named.
    """
    if at is not None:
        _ = features[at]
        return at
    if len(features) != 1:
        raise ValueError(
            f"the folder has {len(features)} feature maps: {few(list(features))}; choose one, at="
        )
    return next(iter(features))


def _all_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _of_samples(features: Features, column: FeatureColumn, keys: Sequence[str]) -> tuple[Queries, list[int]]:
    """Return the features of samples of the folder, and their rows.

    Raises:
        KeyError: No sample has this key.
    """
    places: dict[str, int] = {}
    for row, key in enumerate(features.sample_keys):
        places.setdefault(key, row)
    for key in keys:
        if key not in places:
            error = unknown_name("sample", key, features.sample_keys)
            error.add_note("to search for an input of the model, pass client=")
            raise error
    rows = [places[key] for key in keys]
    return Queries(column[rows], tuple(keys)), rows


def _through_model(
    features: Features, name: str, query: InputSet, client: Client, tap: Tap | None
) -> tuple[Queries, Any]:
    """Run queries through the model that made the folder.

    Raises:
        ValueError: The model or the tap is another one, or the extraction had edits.
    """
    job = features.job
    if "edits" in job:
        raise ValueError(
            "the features were made with edits; extract the query with the same edits, and pass its values "
            "without client="
        )
    model = client.model(job["model"]["id"], has_digest=True)
    changes = manifest.differences({"model": job["model"]}, {"model": described_model(model)})
    if changes:
        lines = "\n  ".join(changes)
        raise ValueError(f"model {model.model_id!r} is not the one that made {features.root}:\n  {lines}")
    where = _tap_of(features, name, tap)
    batches: Batches = batches_of(query, _QUERY_BATCH)
    rows, names, shown = [], list[str](), list[Any]()
    options = CallOptions(numerics=job.get("numerics", "exact"))
    for index, batch in enumerate(batches):
        maps = client.extract(
            model.model_id,
            with_flags(batch, job.get("flags", {})),
            [where],
            options=options,
            adapter=job.get("adapter", ""),
        )
        names_of_others = set(maps) - {name}
        values = rows_of(maps.without(names_of_others), where)
        rows.append(values)
        label = getattr(batches, "sample_label", lambda *_: "")
        names += [label(index, position) for position in range(len(values))]
        shown += [sample_input(batch, position) for position in range(len(values))]
    inputs = tuple(shown[:MOST_QUERIES_SHOWN])
    return Queries(np.concatenate(rows), named_queries(names), inputs), model.preprocessing


def _tap_of(features: Features, name: str, tap: Tap | None) -> Tap:
    """Return the tap of a feature map.

    Raises:
        ValueError: It had options, which only the caller has, or the caller's are others.
    """
    known = [entry for entry in features.job["taps"] if _makes(features, entry, name)]
    if tap is not None:
        if plain(tap) not in known:
            raise ValueError(f"the tap differs from the folder's: {known}")
        return tap
    if not any(isinstance(entry, str) for entry in known):
        raise ValueError(f"{name!r} was extracted with options; pass the same tap, tap=trocar.tap(...)")
    return tap_of(name)


def _makes(features: Features, entry: object, name: str) -> bool:
    """Whether a described tap made a feature map."""
    selector = entry if isinstance(entry, str) else entry["selector"]  # type: ignore[index]
    alias = None if isinstance(entry, str) else entry.get("alias")  # type: ignore[attr-defined]
    return name == alias if alias else name in features.expansions.get(selector, ())
