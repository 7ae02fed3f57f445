"""What a server keeps under names, from the wire and to it: lists of edits, directions."""
