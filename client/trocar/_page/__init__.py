"""The page: a web interface of a server, and the gateway between a browser and gRPC."""
