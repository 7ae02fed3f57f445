"""One training step: forward, backward, update, rollback."""
