"""Recording of one pass: its calls in order, and the memory it uses."""
