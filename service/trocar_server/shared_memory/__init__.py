"""Shared memory for the bytes of tensors, lent to processes of the same user on the same host.

    lender = open_lender(limit_bytes=1 << 30)      # None where there is no shared memory
    with lender.loan("alice") as loan:             # as long as the caller's stream lasts
        segment = loan.open(1 << 20)
        loan.release_name(segment.id)              # the caller has mapped it
        with lender.borrow("alice", segment.id) as segment:
            segment.read(0, payload)

Note: [Concurrent writes to shared memory]
    A caller can write to a segment at any time. So bytes are copied out of it once, before anything looks at
    them, and everything that is checked, hashed or computed is the copy. Into a segment the server only
    writes, and reads nothing back. Numbers such as offsets are never in a segment; they are sent in messages.

    What a mapping cannot survive is a file that gets shorter (SIGBUS). Its length is looked at before every
    piece of 4 MiB; to slip in between takes a process of the server's own user, which could as well kill it.
"""

from trocar_server.shared_memory.call_socket import CallSocket
from trocar_server.shared_memory.folder import FOLDER, remove_dead
from trocar_server.shared_memory.lender import Lender, Loan, open_lender
from trocar_server.shared_memory.segment import Segment
from trocar_server.shared_memory.slot import Slot

__all__ = ["FOLDER", "CallSocket", "Lender", "Loan", "Segment", "Slot", "open_lender", "remove_dead"]
