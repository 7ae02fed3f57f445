"""Sources of samples; `source_opening.open_source` opens the right one."""
