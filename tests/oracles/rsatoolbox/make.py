"""Make the RDMs and comparisons of rsatoolbox that `test_rsa.py` compares with.

    python -m venv /tmp/rsa && /tmp/rsa/bin/pip install rsatoolbox
    /tmp/rsa/bin/python tests/oracles/rsatoolbox/make.py

Features are stored, too: streams of random numbers may change with NumPy.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

rsatoolbox: Any = import_module("rsatoolbox")  # in no environment of the project

DISTANCES = ("correlation", "euclidean")
COMPARISONS = {"spearman": "spearman", "pearson": "corr", "cosine": "cosine"}


def main() -> None:
    """Write `answers.npz`."""
    rng = np.random.default_rng(7)
    features = {name: rng.standard_normal((12, width)) for name, width in (("a", 30), ("b", 9), ("c", 200))}
    features["c"][4] = features["c"][2]  # equal samples
    result: dict[str, Any] = {f"features_{name}": values for name, values in features.items()}
    for distance in DISTANCES:
        rdms = {
            name: rsatoolbox.rdm.calc_rdm(rsatoolbox.data.Dataset(values), method=distance)
            for name, values in features.items()
        }
        for name, rdm in rdms.items():
            result[f"{distance}_{name}"] = rdm.get_matrices()[0]
        for own, theirs in COMPARISONS.items():
            result[f"{distance}_{own}"] = np.array(
                [
                    [rsatoolbox.rdm.compare(x, y, method=theirs)[0, 0] for y in rdms.values()]
                    for x in rdms.values()
                ]
            )
    path = Path(__file__).with_name("answers.npz")
    np.savez_compressed(path, version=np.array(version("rsatoolbox")), **result)


if __name__ == "__main__":
    main()
