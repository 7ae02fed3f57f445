"""What a server keeps under names, in requests: edits, samples of data sets, fits of directions."""
