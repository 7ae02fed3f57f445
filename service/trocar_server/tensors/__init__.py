"""Operations on one tensor: edits, reductions, statistics. No model, no wire."""
