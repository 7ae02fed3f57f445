"""Commands about what a server has: its state, models in memory, trainers, data sets, edits; and profiles."""
