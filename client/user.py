"""The user of this process."""

from __future__ import annotations

import os
import pwd

__all__ = ("user_name",)


def user_name() -> str:
    """Returns the name of the user of this process, or the uid if the user has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
