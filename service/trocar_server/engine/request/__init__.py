"""Checked requests as plain data, free of protobuf and torch modules."""
