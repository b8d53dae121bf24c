"""The entry point of ``probingd``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from probing.api.errors import PrivilegeError
from probing.daemon.supervisor.health import guard

__all__ = ("main",)


def main() -> None:
    """Runs the command line of this process. Exit code: 0 success, 1 error, 2 wrong usage, 3 something is missing."""
    sys.exit(guard(lambda: _dispatch(sys.argv[1:])))


def _dispatch(args: Sequence[str]) -> int:
    if args[:1] == ["run"] and not {"-h", "--help"} & set(args):
        # The supervisor avoids typer, which would cost 70 ms at the start and 3.7 MiB of memory all the time.
        from probing.daemon.cli.run import run

        return run(args[1:])
    from probing.daemon.cli.app import invoke

    try:
        return invoke(args)
    except PermissionError as e:
        what = f"{e.filename} cannot be read" if e.filename else f"{args[0]} lacks a right"
        raise PrivilegeError(f"{what}: {e.strerror}", hint="run this as root") from e


if __name__ == "__main__":
    main()
