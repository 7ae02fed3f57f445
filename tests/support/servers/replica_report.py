"""Report of a replica, as its server sends them to gateways."""

from typing import Any


def replica_report(replica_id: str, model_id: str, address: str, **values: Any) -> dict[str, Any]:
    """Return the report of a replica without work; `values` replace those of its fields."""
    return {
        "replica_id": replica_id,
        "model_id": model_id,
        "address": address,
        "client_address": address,
        "metrics_address": "",
        "slot": "0",
        "waiting_s": 0.0,
        "call_count": 0,
        "is_draining": False,
        **values,
    }
