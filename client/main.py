"""``probingctl``: runs a command, reports its error and returns its exit code."""

from __future__ import annotations

import gc
import io
import os
import sys
from contextlib import suppress
from typing import Any

from probing.api.errors import InternalError, ProbingError, UsageError
from probing.api.numpy_import import hide_numpy
from probing.client import interrupt

__all__ = ("main",)

# The exit code that a shell reports for SIGPIPE, when the program that reads stdout, such as `head`, has ended.
_NO_READER = 141
# The arguments of gc.set_threshold: Python's garbage collector runs less often than with its default, 700, 10, 10.
_COLLECTED = (50_000, 20, 20)


def main(arguments: list[str] | None = None) -> int:
    """Runs ``probingctl`` and returns its exit code; docs/cli.md lists the codes.

    Without ``arguments`` it uses the arguments of the process and ends the process, within a second after Ctrl-C.
    """
    if arguments is None:
        code = interrupt.CODE
        with suppress(KeyboardInterrupt):
            _prepare()
            code = _run(sys.argv[1:])
        interrupt.leave(code)
    return _run(arguments)


def _prepare() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Characters that the encoding lacks are escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    interrupt.watch()
    # The rows of many nodes are a million objects without cycles: the collector would traverse them and free nothing.
    gc.set_threshold(*_COLLECTED)
    # The commands that need numpy call allow_numpy.
    hide_numpy()


def _run(arguments: list[str]) -> int:
    try:
        code = _command(arguments)
        sys.stdout.flush()
        return code
    except ProbingError as e:
        return _fail(e)
    except BrokenPipeError:
        # At exit Python must not flush into the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except KeyboardInterrupt:
        return interrupt.CODE
    except Exception as e:
        if os.environ.get("PROBING_DEBUG"):
            raise
        return _fail(InternalError(f"{type(e).__name__}: {e}", hint="report the output with PROBING_DEBUG=1"))


def _command(arguments: list[str]) -> int:
    import typer

    if "_PROBINGCTL_COMPLETE" in os.environ:
        # packaging/completion sets this variable: typer then prints candidates and ends.
        from typer._completion_classes import completion_init

        completion_init()
    from probing.client.app import program

    # Which click module typer uses depends on the version of typer.
    click_error: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        code = program().main(arguments, prog_name="probingctl", standalone_mode=False)
    except typer.Abort:
        return interrupt.CODE
    except typer.Exit as e:
        return e.exit_code
    except SystemExit as e:
        # click turns a BrokenPipeError into SystemExit(1).
        return _NO_READER if e.code == 1 else int(e.code or 0)
    except click_error as e:
        raise _usage(e) from None
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> UsageError:
    message = str(error.format_message()) or "no command was given"
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "probingctl"
    hint = f"`{path} --help` shows what it takes"
    if (option := getattr(error, "option_name", None)) is not None and context is not None:
        message = f"no such option: {option}" if hasattr(error, "possibilities") else message
        hint = f"{_nearest(option, context)}{hint}"
    return UsageError(message[0].lower() + message[1:].rstrip("."), hint=hint)


def _nearest(option: str, context: Any) -> str:
    from difflib import get_close_matches

    parameters = [*context.command.params, *context.find_root().command.params]
    known = sorted({name for parameter in parameters for name in parameter.opts if name.startswith("-")})
    found = get_close_matches(option, known, n=1)
    return f"did you mean {found[0]}? " if found else ""


def _fail(error: ProbingError) -> int:
    from probing.api.text import escape

    if (code := interrupt.code_if_pressed()) is not None:
        return code
    with suppress(BrokenPipeError):
        sys.stderr.write(f"error: {escape(error.message)}\n")
        if error.hint:
            sys.stderr.write(f"hint: {escape(error.hint)}\n")
    return error.exit_code
