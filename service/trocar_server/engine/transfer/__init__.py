"""Transfers: copies between host memory and the models' device; on a CPU there is nothing to copy.

    payload = this_thread.transfers.to_host(value)      # on the owner thread; the copy may still be running
    copies = this_thread.transfers.take()               # copies that were begun, None where there are none
    await copies.arrived()                  # on the event loop: now the bytes may be read

Work that does not take its copies ends only when they are done: see `DeviceThread`.
"""

from trocar_server.engine.transfer.cuda import transfers_of
from trocar_server.engine.transfer.streams import CopyBackend, StreamTransfers
from trocar_server.engine.transfer.transfers import Copies, HostTransfers, Transfers, this_thread, using

__all__ = [
    "Copies",
    "CopyBackend",
    "HostTransfers",
    "StreamTransfers",
    "Transfers",
    "this_thread",
    "transfers_of",
    "using",
]
