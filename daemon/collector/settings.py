"""Reads the limits of the store, and the users of the daemon's processes, from the configuration."""

from __future__ import annotations

import difflib
import math
import pwd
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from probing.api.errors import ConfigError
from probing.api.tables import TABLES
from probing.api.tables.user import SCHEMA, USER_NAME
from probing.daemon.config import LEAST_DAYS, LEAST_TABLE_BYTES, Config, checked_text, text_of
from probing.daemon.store.limits import StoreLimits, TableLimits

__all__ = ("check_setting", "check_settings", "limits_of", "own_users", "user_number")

_DAY_S = 86_400.0
_MAX_BYTES = 2.0**62
_MAX_DAYS = 36_500.0
_TABLE_BYTES, _TABLE_DAYS = "store.table_max_bytes", "store.table_max_age_days"


def limits_of(config: Config, value: Callable[[str], Any]) -> StoreLimits:
    """Returns the limits of the store. ``value`` returns the current value of a setting. Raises ConfigError."""
    store = config.store
    tables: dict[str, TableLimits] = {}
    for name, size in _table_numbers(_TABLE_BYTES, value(_TABLE_BYTES)).items():
        tables[name] = TableLimits(max_bytes=int(size))
    for name, days in _table_numbers(_TABLE_DAYS, value(_TABLE_DAYS)).items():
        tables[name] = tables.get(name, TableLimits())._replace(max_age_s=days * _DAY_S)
    return StoreLimits(
        max_bytes=value("store.max_bytes"),
        keep_free_bytes=value("store.keep_free_bytes"),
        max_age_s=value("store.max_age_days") * _DAY_S,
        part_bytes=store.part_bytes,
        segment_bytes=store.segment_bytes,
        sync_interval_s=store.sync_interval_s,
        grace_s=store.grace_s,
        tables=tables,
    )


def check_setting(key: str, value: Any) -> None:
    """Checks a value whose type was checked before. Raises ConfigError."""
    if key in (_TABLE_BYTES, _TABLE_DAYS):
        _table_numbers(key, value)


def check_settings(config: Config) -> None:
    """Raises the ConfigError that a collector with the configuration ``config`` would raise at its start."""
    limits_of(config, lambda key: checked_text(key, text_of(config, key)))
    user_number(config.users.service)


def _table_numbers(key: str, entries: Sequence[str]) -> Mapping[str, float]:
    least, most = (LEAST_TABLE_BYTES, _MAX_BYTES) if key == _TABLE_BYTES else (LEAST_DAYS, _MAX_DAYS)
    found: dict[str, float] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        if name in found:
            raise ConfigError(f"{key} has {name} twice", hint="leave out one of them")
        hint = _no_table(name)
        if hint:
            raise ConfigError(f"{key} = {entry[:80]!r} is wrong: there is no stored table {name[:80]!r}", hint=hint)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            example = "2000000000" if key == _TABLE_BYTES else "1.5"
            hint = f"it must be TABLE=NUMBER, at least {least:.12g}, such as {name}={example}"
            raise ConfigError(f"{key} = {entry[:80]!r} is wrong", hint=hint)
        found[name] = number
    return found


# Returns a hint if there is no stored table ``name``; an empty string if there is such a table.
def _no_table(name: str) -> str:
    schema, _, rest = name.partition(".")
    if schema == SCHEMA and USER_NAME.fullmatch(rest):
        return ""
    known = [table.name for table in TABLES.values() if not table.live]
    if name in known:
        return ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"tables that can have a limit: {', '.join(sorted(known))}"


def own_users(config: Config) -> frozenset[int]:
    """Returns the uids of the daemon's processes. Root is left out, because training processes may also run as root."""
    users = config.users
    found = set()
    for user in (users.collector, users.service, users.worker):
        with suppress(ConfigError):
            found.add(user_number(user))
    return frozenset(found - {0})


def user_number(user: str) -> int:
    """Returns the uid of a user given by name or number. Raises ConfigError."""
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as e:
        raise ConfigError(f"there is no user {user!r}", hint="create it, or set [users] in the configuration") from e
