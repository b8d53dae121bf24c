"""Options and helpers that several commands of ``probingd`` share."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import ConfigError
from probing.daemon.config import Config

if TYPE_CHECKING:
    from probing.daemon.store.decoder import Decoder
    from probing.daemon.supervisor.rights import Account, Rights

__all__ = ("FORMAT_NAMES", "Format", "FormatOption", "account", "config_of", "decoder", "write_json")

FORMAT_NAMES = ("-f", "--format")


class Format(str, Enum):
    """The format in which an answer is printed."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option(*FORMAT_NAMES, help="Print a table, or JSON for programs.")]


def config_of(context: typer.Context) -> Config:
    """Returns the configuration: the default file, and the options that the command does not define. Raises
    ConfigError.
    """
    return Config.from_args(context.args, default_file=True)


def write_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def decoder(config: Config) -> Decoder:
    """Returns a decoder that runs as the parsers' user if this process can change its user."""
    from probing.daemon.store.decoder import Decoder

    user = account(config, "parser")
    return Decoder(user.uid, user.gid) if user else Decoder()


def account(config: Config, process: str) -> Account | None:
    """Returns the user as which the daemon runs its process ``process``.

    None if no daemon is installed, or if the present process cannot become that user.
    """
    from probing.daemon.supervisor.rights import rights_table

    try:
        rights: Rights = getattr(rights_table(config), process)
    except ConfigError:
        return None
    return rights.account
