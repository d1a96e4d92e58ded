"""``python -m graphir``: the command line, where nothing is installed."""

from .cli import main

__all__: list[str] = []

main()
