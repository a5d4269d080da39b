"""``python -m turnout`` is the ``turnout`` command."""

from turnout.cli import main

if __name__ == "__main__":
    main()
