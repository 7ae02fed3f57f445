"""The commands of `trocar`, one module each."""
