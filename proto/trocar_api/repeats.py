"""Metadata of calls that are sent again after a broken connection."""

REPEATED_KEY = "x-trocar-repeated"
"""Key in the metadata of a call that the client, or a gateway, sends again."""

GRPC_ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
"""The same of gRPC's own retries."""
