"""Workers of fits on a cluster: placed on its nodes, started there, and asked for by their replica."""
