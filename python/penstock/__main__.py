"""``python -m penstock``: the command line, as ``penstock`` where that is not on the path."""

from penstock.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
