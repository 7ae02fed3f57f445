"""Data set janitor: removes abandoned uploads, partial files and unused shards."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trocar_server.storage.durable import DamagedError, remove_partial
from trocar_server.training.datasets.dataset_records import SUFFIX, read_record
from trocar_server.training.datasets.incoming import drop_unused
from trocar_server.training.datasets.layout import DatasetLayout

UPLOAD_ENDS_AFTER_S = 7 * 86_400.0
"""An upload without activity for so long is abandoned and removed."""


def clean(layout: DatasetLayout, clock: Callable[[], float]) -> None:
    """Remove leftovers of killed servers: partial files, abandoned uploads, unreferenced shards.

    Args:
        layout: The folder.
        clock: Returns the seconds since 1970.
    """
    with suppress(OSError):
        remove_partial(layout.incoming)
        for owner in layout.owners.glob("*"):
            with suppress(OSError, DamagedError):
                _clean_owner(layout, owner, clock)
        for path in layout.pool.glob("*"):
            drop_unused(path)


def end_old_uploads(layout: DatasetLayout, principal: str, now_s: float) -> None:
    """Remove a principal's abandoned uploads.

    Raises:
        OSError: The disk is failing.
    """
    for record in layout.records(principal):
        path = layout.path(principal, record.dataset_id)
        if record.signature is None and now_s - path.stat().st_mtime > UPLOAD_ENDS_AFTER_S:
            path.unlink()
            layout.drop_unused_shards(principal)


def _clean_owner(layout: DatasetLayout, owner: Path, clock: Callable[[], float]) -> None:
    remove_partial(owner)
    records = [read_record(path) for path in owner.glob(f"*{SUFFIX}")]
    if records and layout.owner(records[0].principal) == owner:
        end_old_uploads(layout, records[0].principal, clock())
        layout.drop_unused_shards(records[0].principal)
    elif not records:
        for path in (owner / "shards").glob("*"):
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (owner / "shards").rmdir()
        owner.rmdir()
