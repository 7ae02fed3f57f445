"""Saved tensors on disk, within a memory budget; usable alone on any `nn.Module`.

from trocar_server.spool import Spool

spool = Spool("/scratch", budget_bytes=256 << 20)
with spool:
    loss = criterion(model(x), y)
loss.backward()
spool.report()
"""

from trocar_server.spool.allocator_settings import return_freed_memory
from trocar_server.spool.freed_memory import limit_freed_memory
from trocar_server.spool.report import Report
from trocar_server.spool.saved.codec import Codec
from trocar_server.spool.spool import Spool
from trocar_server.spool.spool_errors import (
    CodecError,
    SavedTensorChangedError,
    SpoolError,
    SpoolFullError,
    SpoolReadError,
)

__all__ = [
    "Codec",
    "CodecError",
    "Report",
    "SavedTensorChangedError",
    "Spool",
    "SpoolError",
    "SpoolFullError",
    "SpoolReadError",
    "limit_freed_memory",
    "return_freed_memory",
]
