"""Copies between host memory and the device of the models; on a CPU there is nothing to copy.

    payload = current().to_host(value)      # on the owner thread; its bytes may still be on their way
    copies = current().take()               # what was begun, None where all is there
    await copies.arrived()                  # on the event loop: now the bytes may be read

Work that does not take its copies is not done before they are: see `DeviceThread`.
"""

from trocar_server.engine.transfer.cuda import transfers_of
from trocar_server.engine.transfer.seam import Copies, HostTransfers, Transfers, current, using
from trocar_server.engine.transfer.streams import CopyBackend, StreamTransfers

__all__ = [
    "Copies",
    "CopyBackend",
    "HostTransfers",
    "StreamTransfers",
    "Transfers",
    "current",
    "transfers_of",
    "using",
]
