"""Cluster: the same service on Ray, with one address for clients.

Ray Serve places, supervises, scales and restarts; gRPC carries the bytes:

    client -- gRPC --> gateway (one on every node) -- gRPC --> replica (a complete server of one model)

Gateways and replicas are child processes of Serve's own replicas, workers of fits (ranks) those of actors.
Only the modules `session`, `directory`, `deployments`, `ranks.rank_placement`, `scaling` and `commands` use
Ray; the child processes do not import it.
"""
