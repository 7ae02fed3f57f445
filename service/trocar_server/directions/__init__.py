"""Directions: vectors that are fitted to pooled values of a model, and their store. NumPy alone, in float64.

    values = PooledValues(folder, {"layer3": 768}, sample_count)
    values.write(place=0, first=0, rows=pooled)
    direction = fit_place(request, values.rows(0))
    store.put("alice", "vit", "cats", [direction])

A request is checked by `DirectionRequest` before any value exists.
"""

from trocar_server.directions.direction import Direction, decoded, encoded
from trocar_server.directions.direction_request import DirectionKind, DirectionRequest
from trocar_server.directions.direction_store import DirectionStore, StoredDirections
from trocar_server.directions.fitting import fit_place
from trocar_server.directions.pooled_values import PooledValues, PooledValuesBudget

__all__ = [
    "Direction",
    "DirectionKind",
    "DirectionRequest",
    "DirectionStore",
    "PooledValues",
    "PooledValuesBudget",
    "StoredDirections",
    "decoded",
    "encoded",
    "fit_place",
]
