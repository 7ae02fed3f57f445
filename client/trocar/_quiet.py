"""Quiet gRPC: its own lines on stderr, of every failed handshake and port, are for programmers.

An error says the same in words.

`GRPC_VERBOSITY=INFO` shows them. gRPC reads the variable when it is imported.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
