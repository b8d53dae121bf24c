"""``probingd run`` starts the supervisor in the foreground. It does not import typer, which would stay in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from probing.daemon.config import Config

__all__ = ("run",)


def run(args: Sequence[str]) -> int:
    """Runs the daemon with the configuration of ``args`` until a signal ends it."""
    from probing.daemon.supervisor.journal import log_to_stderr
    from probing.daemon.supervisor.loop import Supervisor
    from probing.daemon.supervisor.requirements import make_missing_users, needs_sys_admin
    from probing.daemon.supervisor.rights import changes_users, rights_table

    def read() -> Config:
        return Config.from_args(args, default_file=True)

    config = read()
    log_to_stderr("supervisor")
    # Packages create the users at installation. A wheel does not, so they are created here.
    if changes_users() and (made := make_missing_users(config.users)):
        logging.getLogger(__name__).info("made %s", ", ".join(made))
    return Supervisor(config, rights_table(config, sys_admin=needs_sys_admin()), reread=read).run()
