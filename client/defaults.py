"""The configuration of the client: ``probing/client.toml`` in XDG_CONFIG_HOME, else in ``~/.config``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from probing.api.errors import ConfigError

__all__ = ("defaults", "path", "zone_of")

_KEYS = ("tz",)
_MAX_BYTES = 1 << 16


def path() -> Path | None:
    """Returns where the configuration is, whether it exists or not; None for a user without a home."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base, "probing", "client.toml")
    home = os.environ.get("HOME", "")
    return Path(home, ".config", "probing", "client.toml") if home.startswith("/") else None


def defaults() -> dict[str, str]:
    """Returns the settings of the configuration by key, none where there is no file. Raises ConfigError."""
    file = path()
    try:
        found = {} if file is None else _parsed(_read(file))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # A home that this user may not enter is another's: as under `sudo -u`.
        return {}
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}", hint="make it readable, or remove it") from None
    except ValueError as e:
        raise ConfigError(f"{file} is no TOML: {e}", hint='for example: tz = "Asia/Shanghai"') from None
    for key, value in found.items():
        if key not in _KEYS:
            from difflib import get_close_matches

            near = get_close_matches(key, _KEYS, n=1)
            known = f"did you mean {near[0]}?" if near else f"it may have {', '.join(_KEYS)}"
            raise ConfigError(f"{file}: there is no setting {key}", hint=known)
        if not isinstance(value, str):
            raise ConfigError(f"{file}: {key} is no text", hint='for example: tz = "Asia/Shanghai"')
    return found


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES)


def _parsed(data: bytes) -> dict[str, Any]:
    # Most users have no such file.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(data.decode())


def zone_of(given: str | None) -> str:
    """Returns the name of the time zone: ``given`` by --tz or PROBING_TZ, else the configuration's, else UTC."""
    return given or defaults().get("tz", "UTC")
