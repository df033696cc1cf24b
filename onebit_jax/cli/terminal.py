"""Where the tables of the command line go."""

import sys
from typing import Any


def console() -> Any:
    """A console of rich, which must be there, wide enough for the tables."""
    from rich.console import Console

    # Else cut to the 80 columns of no terminal, when the output goes to a file.
    return Console(width=None if sys.stdout.isatty() else 110)
