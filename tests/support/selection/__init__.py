"""Which tests a run has: a sample, everything, or the tests of a change."""
