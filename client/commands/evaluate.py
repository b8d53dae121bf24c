"""``eval``: runs Python code in processes of jobs, where the administrators of their nodes allow it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from probing.api.errors import PrivilegeError, TargetError, UsageError
from probing.api.text import escape
from probing.client.commands.unsupported import nearest
from probing.client.messages import Evaluated, raised_text
from probing.client.options import Job, Rank
from probing.client.render.output import write_objects
from probing.client.session import job_named, opened, report_failures
from probing.client.settings import Settings, process_id
from probing.client.times import seconds

__all__ = ("EXAMPLES", "Options", "answer_lines", "run")

EXAMPLES = ("probingctl eval --job 4711 --rank 0 'trainer.state.step'", "probingctl eval 4242 --file look.py")
_MAX_CODE = 64 << 10
_EXAMPLE = "for example: probingctl eval 4242 'len(model)'"


@dataclass(frozen=True, slots=True)
class Options:
    """``words`` are pids, followed by the code if ``file`` is not given."""

    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PID]... CODE", help="An expression, or statements.")
    ] = None
    job: Job = None
    rank: Rank = None
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="File with the code, in place of CODE; - for stdin.")
    ] = None
    limit: Annotated[str, typer.Option(metavar="TIME", help="Time limit for the start and the run of the code.")] = "5s"


def run(settings: Settings, options: Options) -> None:
    words = list(options.words or ())
    named = options.job is not None or options.rank is not None
    if options.file is None and len(words) == 1 and words[0].isdigit() and not named:
        raise UsageError(f"there is no code to run in process {words[0]}", hint=_EXAMPLE)
    code = _code(words, options.file)
    pids = [process_id(word) for word in words]
    if not pids and not named:
        raise UsageError("eval needs the processes in which to run the code", hint="give a pid, --job JOB or --rank R")
    length = seconds(options.limit)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job or "")
        try:
            found = cluster.evaluate(code, pids, job, rank=options.rank, seconds=length)
        except PrivilegeError as e:
            raise PrivilegeError(e.message, hint="; ".join(filter(None, (e.hint, nearest(code))))) from None
        report_failures(found.failures, all_failed=not found.results)
        results = sorted(
            found.results, key=lambda r: (r["job"], r["rank"] is None, r["rank"] or 0, r["node"], r["pid"])
        )
        write_objects(settings, results, "".join(_lines(results)), [_flat(result) for result in results])
    if raised := [result["raised"] for result in results if result["raised"] is not None]:
        text = raised_text(raised[0])
        where = f"in {len(raised)} of {len(results)} processes " if len(results) > 1 else ""
        raise TargetError(f"{where}the code raised {escape(text, 1000)}", hint="the lines above say where")


def _code(words: list[str], file: Path | None) -> str:
    """Returns the code from ``file``, or removes it from the end of ``words`` and returns it."""
    if file is None:
        if not words:
            raise UsageError("there is no code to run", hint=_EXAMPLE)
        return words.pop()
    try:
        with sys.stdin if file == Path("-") else file.open(encoding="utf-8") as stream:
            code = stream.read(_MAX_CODE + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(
            f"cannot read {file}: {getattr(e, 'strerror', None) or e}", hint="name a file of Python code"
        ) from e
    if len(code) > _MAX_CODE:
        raise UsageError(f"{file} has more than {_MAX_CODE:,} characters", hint="import the rest from a module")
    return code


def _lines(results: Sequence[Evaluated]) -> Iterator[str]:
    """Yields, for each process, the output of the code, then its value or traceback; several processes get headings."""
    for result in results:
        if len(results) > 1:
            rank = "" if result["rank"] is None else f"rank {result['rank']}, "
            yield escape(f"{rank}pid {result['pid']} on {result['node']}:") + "\n"
        yield from answer_lines(result)


def answer_lines(result: Evaluated) -> Iterator[str]:
    """Yields the output of the code, then its value, or the frames of its exception."""
    yield from _block(result["output"])
    if result["dropped"]:
        yield f"({result['dropped']:,} more characters of output were dropped)\n"
    if result["value"] is not None:
        yield from _block(result["value"])
    if result["raised"] is not None:
        yield from _traceback(result["raised"]["frames"])


def _traceback(frames: Iterable[Sequence[str | int]]) -> Iterator[str]:
    for file, line, function in frames:
        yield escape(f'  File "{file}", line {line}, in {function}') + "\n"


def _block(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield escape(line) + "\n"


def _flat(result: Evaluated) -> dict[str, object]:
    raised = result["raised"]
    found = {name: value for name, value in result.items() if name != "raised"}
    return {**found, "error": raised["type"] if raised else None, "message": raised["message"] if raised else None}
