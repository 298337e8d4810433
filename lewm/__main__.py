"""`python -m lewm`, the same as the `lewm` command."""

from lewm.cli import main

if __name__ == "__main__":
    main()
