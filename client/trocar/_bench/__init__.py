"""`trocar bench`: a load on a server, and what came of it."""
