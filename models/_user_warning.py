"""Warnings for people: shown at the line of theirs that led to them.

Knows nothing of what they say.
"""

import sys
import warnings


def warn_user(text: str) -> None:
    """Issue a `UserWarning` at the line that called this package."""
    warnings.warn(text, stacklevel=_caller_level())


def _caller_level() -> int:
    """Return the `stacklevel` by which a caller of this warns at its user's line.

    From Python 3.12 on `skip_file_prefixes` does this.
    """
    level, frame = 1, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] == package
    ):
        level, frame = level + 1, frame.f_back
    return level
