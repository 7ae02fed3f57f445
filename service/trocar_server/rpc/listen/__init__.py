"""Listeners of the server: TLS, Unix sockets, the health port."""
