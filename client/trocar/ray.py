"""Bulk extraction with Ray: `extract_dataset` on many machines, and a transform for Ray Data.

    import trocar.ray

    client = trocar.connect("gpu1:50051,gpu2:50051", token=token)
    trocar.ray.extract_dataset(client, "resnet50", "/shared/photos", ["avgpool"], "features/", workers=8)

    rows = ray.data.read_images("/shared/photos").map_batches(
        trocar.ray.Extract,
        fn_constructor_kwargs={"target": "gpu1:50051", "model_id": "resnet50", "taps": ["avgpool"]},
        batch_size=32,
        concurrency=4,
    )

It needs `pip install "trocar[ray]"`, and neither PyTorch nor the server. Images go to the server with gRPC,
not through Ray's object store.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._export.job import DatasetReport, Progress, extract_dataset_with
from trocar._export.options import Options
from trocar._export.ray_pool import RayPool, Work
from trocar._extras import need
from trocar._sync.client import connect
from trocar.errors import PermissionDeniedError, ServerUnavailableError

if TYPE_CHECKING:
    from trocar._base.tensors import Array
    from trocar._request.taps import Tap
    from trocar._sync.client import Client

__all__ = ["Extract", "extract_dataset", "session"]

_CONNECT_S = 5.0


def extract_dataset(
    client: "Client",
    model_id: str,
    source: object,
    taps: "str | Tap | Sequence[str | Tap]",
    out: str | os.PathLike[str],
    *,
    workers: int = 4,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> DatasetReport:
    """Run an entire data set through a model, read and sent by actors on the nodes of a Ray cluster.

    The files are, byte for byte, those of `trocar.extract_dataset`, and either of the two resumes what the
    other began. Ray must be initialized (`ray.init(address=...)`); otherwise it starts on this machine.

    Args:
        client: A connected client; the actors connect to the same addresses with the same token.
        model_id: The id of a loaded model.
        source: As in `trocar.extract_dataset`; files must be at the same path on every node.
        taps: As in `Client.extract`.
        out: The folder to write to, on this machine.
        workers: Actors, spread over the nodes; they take no CPUs of Ray, so that replicas may have all. At
            most eight batches of feature maps for each are in Ray's object store.
        progress: Called after every batch.
        options: The others of `trocar.extract_dataset`.

    Raises:
        MissingExtraError: Ray is not installed.
        TrocarError: As `trocar.extract_dataset`; completed work is kept.
        ValueError: `workers` is below 1, or another option is out of range.
    """
    need("trocar.ray", "ray", "ray")
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")

    def pool(work: Work) -> RayPool:
        return RayPool(work, workers)

    chosen = Options.of(**options)
    return extract_dataset_with(pool, client, model_id, source, taps, out, chosen, progress)


class Extract:
    """Transform for `map_batches` of Ray Data: adds a column for each feature map to a batch.

    Args:
        target: Addresses of gateways or servers, as in `trocar.connect`.
        model_id: The id of a loaded model.
        taps: As in `Client.extract`.
        column: The column with images or arrays; images are uint8 (height, width, 3), or encoded bytes.
        keeps_input: Whether that column stays in the result.
        connection: Options of `trocar.connect`, such as `token`.
        options: Options of `Client.extract`.
    """

    def __init__(
        self,
        target: str,
        model_id: str,
        taps: "str | Tap | Sequence[str | Tap]",
        *,
        column: str = "image",
        keeps_input: bool = False,
        connection: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._client = connect(target, **(connection or {}))
        self._model_id, self._taps, self._options = model_id, taps, options
        self._column, self._keeps_input = column, keeps_input

    def __call__(self, batch: "dict[str, Array]") -> "dict[str, Array]":
        """Return the batch with the feature maps, (rows, ...) each.

        Raises:
            TrocarError: The call failed; see `Client.extract`.
            ValueError: There is no such column.
        """
        if self._column not in batch:
            raise ValueError(f"the batch has no column {self._column!r}; it has {', '.join(batch)}")
        given = batch[self._column]
        is_image = given.dtype == object or (given.ndim == 4 and given.dtype == np.uint8)
        maps = self._client.extract(
            self._model_id, list(given) if is_image else given, self._taps, **self._options
        )
        kept = {name: column for name, column in batch.items() if self._keeps_input or name != self._column}
        return kept | {name: np.asarray(values) for name, values in maps.items()}


@contextmanager
def session(address: str) -> Iterator[None]:
    """Connect to a Ray cluster.

    Args:
        address: `auto` for the one of this machine, an address, or `local` for one that ends with the
            context.

    Raises:
        MissingExtraError: Ray is not installed.
        ServerUnavailableError: No cluster answers there.
        PermissionDeniedError: The cluster wants Ray's own token.
    """
    need("--ray", "ray", "ray")
    import ray
    from ray.exceptions import AuthenticationError

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray (2.60) would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise PermissionDeniedError(
            f"the Ray cluster at {address!r} wants its own token: {_first_line(error)}; see RAY_AUTH_MODE "
            "and RAY_AUTH_TOKEN_PATH in the documentation of Ray"
        ) from None
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        raise ServerUnavailableError(
            f"no Ray cluster answers at {address!r} ({_first_line(error)}); start one with `ray start "
            "--head`, or use --ray local"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
