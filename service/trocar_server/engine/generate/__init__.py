"""Generation: tokens that follow a prompt, one after the other, with taps and edits at each."""
