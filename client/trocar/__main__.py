"""`python -m trocar` is the `trocar` command."""

from trocar._cli import main

main()
