"""Metadata between clients, the gateways of a cluster and their replicas."""

GATEWAY_KEY = "x-trocar-gateway"
"""Key in the trailing metadata of a gateway."""

LISTS_REPLICAS = "1"
"""Its value where replicas may be called directly; see `ListReplicas`."""

REPLICA_SERVICE = "trocar.replica."
"""What a service of health checks begins with that only one replica has; its id follows."""
