"""Load benchmark (`trocar bench`): a load on a server, and its results."""
