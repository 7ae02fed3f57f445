"""What there is to read; `opening.open_source` finds the right one."""
