"""``repl``: reads Python from a prompt and runs it in processes of a job, where the nodes' administrators allow it."""

from __future__ import annotations

import ast
import codeop
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import ProbingError, UsageError
from probing.api.text import escape, plural, ranks_of
from probing.client.commands.evaluate import answer_lines
from probing.client.messages import Evaluated, raised_text
from probing.client.options import Job, Rank
from probing.client.session import job_named, opened, report_failures
from probing.client.settings import Settings, process_id
from probing.client.times import seconds

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "Repl", "inputs", "is_whole", "run")

EXAMPLES = ("probingctl repl --job 4711 --rank 0", "probingctl repl 4242")
_MAX_NAMES = 200
# A dotted name before the cursor.
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\.?\Z")
# How long the names of an object are cached, s, because asking for them stops the program for some 0.4 ms.
_REMEMBERED_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """``words`` are pids."""

    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="Processes.")] = None
    job: Job = None
    rank: Rank = None
    limit: Annotated[str, typer.Option(metavar="TIME", help="Time limit for the start and the run of each input.")] = (
        "5s"
    )


def run(settings: Settings, options: Options) -> None:
    pids = [process_id(word) for word in options.words or ()]
    if not pids and options.job is None and options.rank is None:
        raise UsageError("repl needs the processes in which to run the code", hint="give a pid, --job JOB or --rank R")
    with opened(settings) as cluster:
        repl = Repl(cluster, pids, job_named(cluster, options.job or ""), options.rank, seconds(options.limit))
        greeting = repl.begin()
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                sys.stdout.write(greeting)
                _converse(repl)
            else:
                for text in inputs(sys.stdin):
                    repl.take(text)
        finally:
            repl.end()


@dataclass
class Repl:
    """A session in the processes ``pids``, or in the trainers of ``job``, limited to ``rank`` if a rank is given.

    ``limit``: see ``Options``. ``write`` is called with the answers as text, ``complain`` with error messages.
    """

    cluster: Cluster
    pids: Sequence[int]
    job: str
    rank: int | None
    limit: float
    write: Callable[[str], object] = field(default_factory=lambda: sys.stdout.write)
    complain: Callable[[str], object] = field(default_factory=lambda: sys.stderr.write)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _first: int = 0
    _names: dict[str, tuple[float, list[str]]] = field(default_factory=dict)

    def begin(self) -> str:
        """Returns a line about the processes. Raises ProbingError if code can be run in none of them."""
        found = self.cluster.evaluate(
            "__import__('sys').version.split()[0]", self.pids, self.job, rank=self.rank, seconds=self.limit
        )
        report_failures(found.failures, all_failed=not found.results)
        self._first = found.results[0]["pid"]
        ranks = [result["rank"] for result in found.results]
        whose = "" if None in ranks else f" ({ranks_of(ranks)} of job {found.results[0]['job']})"
        versions = sorted({str(result["value"]).strip("'") for result in found.results})
        return (
            escape(f"CPython {', '.join(versions)} in {plural(len(ranks), 'process')}{whose}; Ctrl-D to leave") + "\n"
        )

    def take(self, text: str) -> None:
        """Runs one input and writes its answers. Does not raise ProbingError."""
        if not text.strip():
            return
        self._names.clear()
        try:
            found = self.cluster.evaluate(
                text, self.pids, self.job, rank=self.rank, seconds=self.limit, session=self.session
            )
            report_failures(found.failures, all_failed=not found.results)
            self.write("".join(_lines(found.results)))
        except ProbingError as e:
            self.complain(escape(f"error: {e.message}") + "\n" + (escape(f"hint: {e.hint}") + "\n" if e.hint else ""))
        except KeyboardInterrupt:
            self.complain(f"no longer waiting for the answer; code that still runs is ended after {self.limit:g} s\n")

    def names(self, before: str) -> list[tuple[str, int]]:
        """Returns completions of the dotted name at the end of ``before``, and how many characters each replaces.

        The first process lists the names with ``dir``, for which it reads the attributes of the dotted name.
        """
        match = _DOTTED.search(before)
        if match is None:
            return []
        owner, _, begun = match.group().rpartition(".")
        return [(name, len(begun)) for name in self._of(owner) if name.startswith(begun)][:_MAX_NAMES]

    def end(self) -> None:
        """Drops the names that the session has assigned in the processes."""
        with suppress(ProbingError, KeyboardInterrupt):
            self.cluster.evaluate(
                "None", self.pids, self.job, rank=self.rank, seconds=self.limit, session=self.session, ends=True
            )

    def _of(self, owner: str) -> list[str]:
        asked_at, names = self._names.get(owner, (-_REMEMBERED_S, []))
        if time.monotonic() - asked_at < _REMEMBERED_S:
            return names
        code = f"dir({owner})" if owner else "[*globals(), *__import__('builtins').__dict__]"
        with suppress(ProbingError, ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            (result,) = self.cluster.evaluate(code, [self._first], seconds=self.limit, session=self.session).results
            value = ast.literal_eval(result["value"] or "[]")
            # The process is not trusted: the value may be of any type.
            listed = value if isinstance(value, list) else []
            names = sorted({name for name in listed if isinstance(name, str) and name.isidentifier()})
        self._names[owner] = time.monotonic(), names
        return names


def inputs(lines: Iterator[str]) -> Iterator[str]:
    """Yields the inputs in ``lines``: each statement as soon as it is complete. An empty line ends a block."""
    text = ""
    for line in lines:
        text += line
        if is_whole(text):
            yield text
            text = ""
    yield text


def is_whole(text: str) -> bool:
    """Returns whether ``text`` can be sent: it is a complete statement, or an error that no further line can mend."""
    try:
        return codeop.compile_command(text.rstrip("\n") + "\n" * text.endswith("\n\n"), symbol="single") is not None
    except (SyntaxError, ValueError, OverflowError):
        return True


def _converse(repl: Repl) -> None:
    from probing.client.interrupt import unwatch
    from probing.client.shell.prompt import PythonPrompt

    # Ctrl-C ends the wait for an answer, but not the REPL.
    unwatch()
    prompt = PythonPrompt(repl.names, is_whole)
    while True:
        try:
            text = prompt.ask()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        repl.take(text)


def _lines(results: Sequence[Evaluated]) -> Iterator[str]:
    """Yields the answers; processes with the same answer have one heading."""
    groups: dict[str, list[Evaluated]] = {}
    for result in sorted(results, key=lambda r: (r["rank"] is None, r["rank"] or 0, r["node"], r["pid"])):
        groups.setdefault("".join(_answer(result)), []).append(result)
    for text, group in groups.items():
        if len(results) > 1 and text:
            yield escape(_named(group)) + ":\n"
        yield text


def _named(group: Sequence[Evaluated]) -> str:
    if all(result["rank"] is not None for result in group):
        return ranks_of(result["rank"] for result in group)
    return ", ".join(f"pid {result['pid']} on {result['node']}" for result in group)


def _answer(result: Evaluated) -> Iterator[str]:
    yield from answer_lines(result)
    if (raised := result["raised"]) is not None:
        yield escape(raised_text(raised), 1000) + "\n"
