"""Resolution of a request against one model: targets, edits, outputs, memory."""
