"""Command runs, after their options are parsed."""
