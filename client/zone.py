"""The time zone in which probingctl shows and reads times, and functions that format times in this zone.

The zone is UTC unless --tz or the configuration names another. The configuration is ``probing/client.toml`` in
XDG_CONFIG_HOME, by default ``~/.config``.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

from probing.api.errors import ConfigError, UsageError

__all__ = ("aware", "clock", "clock_ms", "current", "moment", "now_text", "use", "when", "zone_of")

_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)?")
# A zone in the notation of POSIX: CST-8, <+08>-8, EST5EDT. https://pubs.opengroup.org/onlinepubs/9699919799/ (8.3, TZ)
_POSIX = re.compile(r":?(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]{3,}>)[+-]?\d.*")
_SYSTEM = Path("/etc/localtime")
_KEYS = ("tz",)
_MAX_BYTES = 1 << 16
_EXAMPLE = 'for example: tz = "Asia/Shanghai"'


class _Zone:
    """The zone in use; None: the C library's local time."""

    now: tzinfo | None = timezone.utc


def zone_of(given: str | None) -> str:
    """Returns the name of the time zone: ``given`` (--tz or PROBING_TZ), else ``tz`` of the configuration, else UTC."""
    return given or _defaults().get("tz", "UTC")


def use(name: str) -> None:
    """Makes probingctl show and read times in the zone ``name``: Asia/Shanghai, +08:00, local or UTC. Raises UsageError
    for an unknown zone.
    """
    _Zone.now = _zone(name)


def current() -> tzinfo | None:
    """Returns the zone in use; None: the C library's local time, for ``datetime.astimezone``."""
    return _Zone.now


def _is_utc() -> bool:
    return _Zone.now is timezone.utc


def _wall(seconds: float) -> datetime:
    """Returns ``seconds`` since 1970 as a time in the zone in use. Raises the errors of ``datetime.fromtimestamp``."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone(_Zone.now)


def aware(moment: datetime) -> datetime:
    """Returns a time without a zone as a time in the zone in use."""
    if moment.tzinfo is not None:
        return moment
    return moment.astimezone() if _Zone.now is None else moment.replace(tzinfo=_Zone.now)


def _shown(moment: datetime) -> str:
    """Returns the suffix of a time: Z, or its offset such as +08:00."""
    offset = moment.utcoffset() or timedelta()
    if not offset and _is_utc():
        return "Z"
    minutes = round(offset.total_seconds() / 60)
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"


def when(ts: str | None) -> str:
    """Formats the timestamp ``ts`` of an answer in the zone in use, down to seconds: ``2026-11-22 03:12:07Z``."""
    if ts is None:
        return "-"
    return f"{ts[:19].replace('T', ' ')}Z" if _is_utc() else _zoned(ts, "%Y-%m-%d %H:%M:%S")


def moment(ts: str | None) -> str:
    """Formats the timestamp ``ts`` in the zone in use, down to milliseconds: ``2026-11-22 03:12:07.123Z``."""
    if ts is None:
        return "-"
    seconds, _, fraction = ts.removesuffix("Z").replace("T", " ").partition(".")
    rest = f".{fraction[:3]}" if fraction.strip("0") else ""
    return f"{seconds}{rest}Z" if _is_utc() else _zoned(ts, "%Y-%m-%d %H:%M:%S", rest)


def clock(ts: str | None) -> str:
    """Returns the text of ``when`` for ``ts``, without the date if the date is today."""
    return when(ts).removeprefix(f"{_wall(time.time()):%Y-%m-%d} ")


def clock_ms(ts: str) -> str:
    """Formats the time of day of ``ts`` in the zone in use, down to milliseconds: ``03:12:07.123Z``."""
    return f"{ts[11:23]}Z" if _is_utc() else _zoned(ts, "%H:%M:%S.%f")


def now_text(form: str = "%H:%M:%S") -> str:
    """Returns the present time in the zone in use as text, with Z or the offset."""
    now = _wall(time.time())
    return f"{now:{form}}{_shown(now)}"


def _zoned(ts: str, form: str, rest: str = "") -> str:
    try:
        at = datetime.fromisoformat(ts[:19] + (ts[19:23] if "%f" in form else "")).replace(tzinfo=timezone.utc)
        here = _wall(at.timestamp())
    except (OSError, OverflowError, ValueError):
        return ts
    text = f"{here:{form}}"
    return f"{text[:12] if '%f' in form else text}{rest}{_shown(here)}"


def _zone(name: str) -> tzinfo | None:
    text = name.strip()
    if text.upper() in ("UTC", "Z"):
        return timezone.utc
    if text.lower() == "local":
        return _local(os.environ.get("TZ", ""))
    if (offset := _OFFSET.fullmatch(text)) is not None and int(offset[2]) < 24 and int(offset[3] or 0) < 60:
        length = timedelta(hours=int(offset[2]), minutes=int(offset[3] or 0))
        return timezone(length if offset[1] == "+" else -length)
    found = _named(text)
    if found is None:
        raise UsageError(f"{text[:80]} is not a time zone", hint="for example Asia/Shanghai, +08:00, local or UTC")
    return found


def _local(variable: str) -> tzinfo | None:
    """Returns the zone of this machine. Raises UsageError for an unknown TZ, which the C library reads as UTC."""
    if not variable:
        return None if _SYSTEM.exists() else timezone.utc
    if (found := _named(variable.removeprefix(":"))) is not None:
        return found
    if _POSIX.fullmatch(variable) or Path(variable.removeprefix(":")).is_file():
        return None
    raise UsageError(f"TZ={variable[:80]} is not a time zone", hint="set TZ to a zone, or give one with --tz")


def _named(name: str) -> tzinfo | None:
    # The import takes some ms, so commands that use UTC avoid it.
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name) if name else None
    except (KeyError, OSError, ValueError):
        # ``name`` is not a zone: it names no file, names a directory, or leads out of the directory of zones.
        return None


def _path() -> Path | None:
    """Returns the path of the configuration, which need not exist; None for a user without a home."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base, "probing", "client.toml")
    home = os.environ.get("HOME", "")
    return Path(home, ".config", "probing", "client.toml") if home.startswith("/") else None


def _defaults() -> dict[str, str]:
    """Returns the settings of the configuration by key; empty if there is no file. Raises ConfigError."""
    file = _path()
    try:
        settings = {} if file is None else _parsed(_read(file))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # Under `sudo -u` HOME may be another user's directory, which this user has no permission to enter.
        return {}
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}", hint="make it readable, or remove it") from None
    except ValueError as e:
        raise ConfigError(f"{file} is not TOML: {e}", hint=_EXAMPLE) from None
    for key, value in settings.items():
        if key not in _KEYS:
            from difflib import get_close_matches

            near = get_close_matches(key, _KEYS, n=1)
            known = f"did you mean {near[0]}?" if near else f"the settings of the file: {', '.join(_KEYS)}"
            raise ConfigError(f"{file}: there is no setting {key}", hint=known)
        if not isinstance(value, str):
            raise ConfigError(f"{file}: {key} is not a string", hint=_EXAMPLE)
    return settings


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES)


def _parsed(data: bytes) -> dict[str, Any]:
    # The library is imported here because most users have no file of settings to parse.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(data.decode())
