"""Make the answers of faiss' flat indices that `test_nearest_search.py` compares with.

    python -m venv /tmp/faiss && /tmp/faiss/bin/pip install faiss-cpu
    /tmp/faiss/bin/python tests/oracles/faiss/make.py

Rows and queries are stored, too: streams of random numbers may change with NumPy.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

faiss: Any = import_module("faiss")  # in no environment of the project

K = 10


def answers(rows: Any, queries: Any) -> dict[str, Any]:
    """Search with each of the flat indices."""
    width = rows.shape[1]
    unit_rows, unit_queries = rows.copy(), queries.copy()
    faiss.normalize_L2(unit_rows)
    faiss.normalize_L2(unit_queries)
    result: dict[str, Any] = {}
    for metric, index, own, asked in (
        ("euclidean", faiss.IndexFlatL2(width), rows, queries),
        ("dot", faiss.IndexFlatIP(width), rows, queries),
        ("cosine", faiss.IndexFlatIP(width), unit_rows, unit_queries),
    ):
        index.add(own)
        distances, indices = index.search(asked, K)
        result |= {f"{metric}_indices": indices.astype(np.int16), f"{metric}_distances": distances}
    return result


def main() -> None:
    """Write `answers.npz`."""
    rng = np.random.default_rng(20)
    rows = rng.standard_normal((400, 24)).astype(np.float32)
    rows[300:310] = rows[:10]  # equal rows
    queries = np.concatenate([rng.standard_normal((12, 24)).astype(np.float32), rows[5:8]])
    path = Path(__file__).with_name("answers.npz")
    version = np.array(faiss.__version__)
    np.savez_compressed(path, rows=rows, queries=queries, version=version, **answers(rows, queries))


if __name__ == "__main__":
    main()
