"""The interactive shell that ``query`` starts without SQL: statements, and commands that begin with a backslash."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from probing.api.errors import ProbingError, UsageError
from probing.api.text import age, escape, plural
from probing.client.absence import require_all
from probing.client.expressions import with_rows_of_expressions
from probing.client.job_hints import Emptiness, hint_at_jobs
from probing.client.render.output import write_stream
from probing.client.render.progress import Progress
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Grid, show_value, terminal_width
from probing.client.render.writers import FIRST_ROWS, fields_of
from probing.client.session import missing_rows, opened, warn_unless_told
from probing.client.settings import Settings, format_of
from probing.client.shell.words import COMMANDS, command_in, statements

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Shell", "run")

_SHOWN = ("table", "json", "jsonl", "csv")
_Choice = TypeVar("_Choice")
_SWITCH = {"on": True, "off": False}


def run(settings: Settings, params: dict[str, object]) -> None:
    r"""Runs the shell until Ctrl-D or ``\q``. Raises UsageError if stdout is not a terminal."""
    if not sys.stdout.isatty():
        raise UsageError("there is no SQL", hint="give it as an argument; the shell needs a terminal")
    from probing.client.interrupt import unwatch
    from probing.client.shell.prompt import Prompt

    # In the shell Ctrl-C ends the query, but not the shell.
    unwatch()

    shell = Shell(settings, params)
    where = "all nodes" if settings.all_nodes else settings.target
    sys.stdout.write(f"{escape(where)}; end a SELECT with ; and Enter, \\? for help, Ctrl-D to leave\n")
    prompt = Prompt(settings, lambda: shell.settings.all_nodes)
    while not shell.done:
        try:
            text = prompt.ask(shell.unfinished)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        shell.take(text)


@dataclass
class Shell:
    """Runs the statements and commands of the shell, with the settings that earlier commands have changed."""

    settings: Settings
    params: dict[str, object] = field(default_factory=dict)
    vertical: bool | None = None
    timing: bool = True
    done: bool = False
    unfinished: str = ""

    def take(self, text: str) -> None:
        """Runs the statements in ``text`` and a command on its last line. Shows errors; Ctrl-C ends the query.

        SQL before the command is kept as ``unfinished`` if it does not yet end with a semicolon.
        """
        before, command = command_in(text) or (text, "")
        whole, rest = statements(before)
        self.unfinished = rest.strip() if command else ""
        try:
            for sql in [*whole, *([] if command else [rest.strip()])]:
                if sql:
                    self._query(sql)
            if command:
                self._command(command)
        except ProbingError as e:
            sys.stderr.write(f"error: {escape(e.message)}\n" + (f"hint: {escape(e.hint)}\n" if e.hint else ""))
        except KeyboardInterrupt:
            sys.stderr.write("cancelled\n")

    def _format(self) -> Settings:
        """Returns the settings of the next answer; the suffix of its file decides the format."""
        named = format_of(self.settings.output) if self.settings.output is not None else "table"
        return self.settings if named == "table" else replace(self.settings, format=named)

    def _query(self, sql: str) -> None:
        params = {name: value for name, value in self.params.items() if f"${name}" in sql.lower()}
        settings = self._format()
        begin = time.monotonic()
        with opened(settings) as cluster, Progress() as progress:
            sql = with_rows_of_expressions(cluster, sql)
            cluster.watch = progress.update if progress.wanted else None
            with cluster.stream(sql, params) as rows:
                answer = Emptiness()
                if settings.format == "table" and settings.output is None:
                    said = self._show(rows.schema, answer.passed(iter(rows)), progress)
                else:
                    to_terminal = settings.output is None
                    batches = progress.counting(answer.passed(iter(rows)), to_terminal=to_terminal)
                    said = plural(write_stream(settings, rows.schema, batches), "row")
                    if settings.output is not None:
                        said += f" in {escape(str(settings.output))}"
                        self.settings = replace(self.settings, output=None)
            progress.stop()
            took = f", {age((time.monotonic() - begin) * 1e9)}" if self.timing else ""
            if settings.format == "table" or settings.output is not None:
                sys.stdout.write(f"({said}{took})\n")
                sys.stdout.flush()
            # ``opened`` itself writes the warnings of the answers in ``cluster.outcomes``, so they are not repeated.
            warn_unless_told(rows.warnings, missing_rows(cluster.outcomes))
            if answer.empty:
                hint_at_jobs(cluster, sql, params)

    def _show(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], progress: Progress) -> str:
        """Writes the first rows, as a table or with a line for each column. Returns the text that follows the rows.

        Raises PartialAnswer if there is no row and a node did not answer.
        """
        import pyarrow as pa

        found: list[Row] = []
        for batch in batches:
            found.extend(rows_of(pa.Table.from_batches([batch.slice(0, FIRST_ROWS + 1 - len(found))])))
            if len(found) > FIRST_ROWS:
                break
        progress.stop()
        if not found:
            require_all()
        kept = found[:FIRST_ROWS]
        width = terminal_width() or 100
        grid = Grid(fields_of(schema, flex=True), kept, width)
        if self.vertical or (self.vertical is None and grid.width > width and kept):
            sys.stdout.write(_vertical(kept))
        else:
            sys.stdout.write(grid.head(bold=True) + grid.lines(kept))
        more = len(found) > FIRST_ROWS
        return f"the first {plural(FIRST_ROWS, 'row')}; \\o FILE writes all" if more else plural(len(kept), "row")

    def _command(self, text: str) -> None:
        name, _, argument = text.rstrip(";").partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "\\d": self._describe,
            "\\x": self._set_vertical,
            "\\timing": self._set_timing,
            "\\f": self._set_format,
            "\\o": self._set_output,
            "\\all": self._set_all,
            "\\set": self._set_param,
            "\\?": self._help,
            "\\q": self._leave,
        }
        if name not in commands:
            raise UsageError(f"there is no command {name}", hint="\\? lists the commands")
        commands[name](argument.strip())

    def _describe(self, argument: str) -> None:
        from probing.client.table_docs import write_docs

        with opened(self.settings) as cluster:
            write_docs(replace(self.settings, format="table", output=None), cluster, argument or None)

    def _set_vertical(self, argument: str) -> None:
        choices: dict[str, bool | None] = {**_SWITCH, "auto": None}
        self.vertical = _chosen(argument, choices, not self.vertical)
        _say("one column per line", {True: "on", False: "off", None: "auto"}[self.vertical])

    def _set_timing(self, argument: str) -> None:
        self.timing = bool(_chosen(argument, _SWITCH, not self.timing))
        _say("timing", "on" if self.timing else "off")

    def _set_format(self, argument: str) -> None:
        if argument not in (*_SHOWN, "parquet", "arrow"):
            raise UsageError(f"unknown format {argument}", hint=f"use one of {', '.join(_SHOWN)}, parquet, arrow")
        self.settings = replace(self.settings, format=argument)

    def _set_output(self, argument: str) -> None:
        path = Path(argument.strip("'\"")).expanduser() if argument else None
        self.settings = replace(self.settings, output=path)
        if path is not None:
            _say("the next answer goes to", f"{path} as {self._format().format}")

    def _set_all(self, argument: str) -> None:
        everywhere = bool(_chosen(argument, _SWITCH, not self.settings.all_nodes))
        self.settings = replace(self.settings, all_nodes=everywhere)
        _say("all nodes", "on" if everywhere else "off")

    def _set_param(self, argument: str) -> None:
        if argument:
            from probing.federation.sql.parameters import parameter

            name, value = parameter(argument)
            self.params[name.lower()] = value
        for name, value in self.params.items():
            _say(f"${name}", repr(value))

    def _help(self, _argument: str) -> None:
        for name, text in COMMANDS.items():
            sys.stdout.write(f"{name:8} {text}\n")

    def _leave(self, _argument: str) -> None:
        self.done = True


def _chosen(argument: str, choices: Mapping[str, _Choice], without: _Choice) -> _Choice:
    if not argument:
        return without
    if argument not in choices:
        raise UsageError(f"{argument} is none of {', '.join(choices)}", hint="\\? explains the commands")
    return choices[argument]


def _say(what: str, value: str) -> None:
    sys.stdout.write(escape(f"{what}: {value}") + "\n")


def _vertical(rows: Iterable[Row]) -> str:
    """Returns a line for each column, below a line with the row's number."""
    lines = []
    for number, row in enumerate(rows, 1):
        names = [escape(name) for name in row]
        wide = max(map(len, names), default=0)
        lines.append(f"-[ {number} ]".ljust(wide + 20, "-"))
        lines += [f"{name:{wide}}  {escape(show_value(v))}" for name, v in zip(names, row.values(), strict=True)]
    return "".join(line + "\n" for line in lines)
