"""``python -m graphir``: the command line, where nothing is installed."""

from .facade.cli import main

__all__: list[str] = []

main()
