"""The one exception that reaches the user as a message instead of a traceback."""

from __future__ import annotations


class BuildError(Exception):
    """Something the developer can fix; its text says what and how."""
