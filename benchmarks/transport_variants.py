"""Transport variants: payload transfer against plain chunks: `python -m benchmarks.transport_variants`.

Up: an array is sent and one element of it comes back. Down: a hosted constant is fetched. Both ends are on
one machine, so variants with fewer bytes show their cost, not their saving.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import trocar
from benchmarks.measuring import Effort, in_turns, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_ROUNDS = 9
_SIZES_MIB = (13, 103)
_CHUNKS = "chunks"


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    config = "\n".join(
        f'[models.blob{size}]\nfactory = "benchmarks.models:Blob"\ninput_shape = [4]\n'
        f"options = {{ mebibytes = {size} }}\n"
        for size in _SIZES_MIB
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        served([], "--host", f"unix:{folder}/trocar.sock", config=config) as server,
    ):
        rows = [result for size in _SIZES_MIB for result in _rows(server.address, size, effort)]
    note = "Time by that of plain chunks through the same Unix socket."
    return [Table("Ways to move a payload", rows, note=note)]


def _rows(address: str, size: int, effort: Effort) -> list[Row]:
    values = np.random.default_rng(0).standard_normal((1, (size << 20) // 4), np.float32)
    sparse = np.where(values > 1.5, values, 0).astype(np.float32)
    with (
        trocar.connect(address, timeout_s=600, shared_memory=False) as plain,
        trocar.connect(address, timeout_s=600) as sharing,
        trocar.connect(address, timeout_s=600, compression="gzip") as packing,
    ):
        lent = sharing.shared_array(values.shape)
        lent[:] = values
        up = partial(plain.extract, f"blob{size}", values, ["corner"])
        ups: Calls = {
            _CHUNKS: up,
            "shared memory": partial(sharing.extract, f"blob{size}", values, ["corner"]),
            "shared memory, `shared_array`": partial(sharing.extract, f"blob{size}", lent, ["corner"]),
            "float16": partial(up, options=trocar.options(wire="float16")),
            "bfloat16": partial(up, options=trocar.options(wire="bfloat16")),
            "gzip, 7 % not zero": partial(packing.extract, f"blob{size}", sparse, ["corner"]),
        }
        downs: Calls = {
            _CHUNKS: partial(plain.extract, f"blob{size}", values[:, :4], ["/out"]),
            "shared memory": partial(sharing.extract, f"blob{size}", values[:, :4], ["/out"]),
        }
        return [
            *_against_chunks(f"{size} MiB up", ups, effort),
            *_against_chunks(f"{size} MiB down", downs, effort),
        ]


Calls = dict[str, Callable[[], object]]


def _against_chunks(name: str, calls: Calls, effort: Effort) -> list[Row]:
    ways = {way: _timed(call) for way, call in calls.items()}
    result = in_turns(ways, effort.of(_ROUNDS))
    medians = {way: statistics.median(seconds) for way, seconds in result.items()}
    base = medians.pop(_CHUNKS)
    note = f"chunks {base * 1e3:.1f} ms"
    return [row(f"{name}, {way}", median / base, note=note) for way, median in medians.items()]


def _timed(call: Callable[[], object]) -> Callable[[], Sequence[float]]:
    return lambda: timed(call)


def main() -> None:
    """Measure and print."""
    for table in run(Effort()):
        print(f"\n### {table.title}\n\n{table.note}\n\n{table.markdown()}")


if __name__ == "__main__":
    main()
