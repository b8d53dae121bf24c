"""``diagnose``: names what is wrong with a job and which ranks are to blame, with the evidence."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from probing.api.errors import ProbingError, UsageError
from probing.api.numpy_import import allow_numpy
from probing.api.text import escape
from probing.client.diagnosis.page_file import PAGES, is_page, write_page
from probing.client.interrupt import leaving_by_it
from probing.client.options import Job
from probing.client.render.output import write_objects
from probing.client.render.table import terminal_width, wrapped
from probing.client.session import job_named, opened
from probing.client.settings import Settings, check_suffix
from probing.client.times import interval
from probing.client.zone import now_text

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.diagnosis.ladder import Diagnosis

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = (
    "probingctl diagnose --all-nodes --job 4711",
    "probingctl diagnose --job 4711 --history --full",
    "probingctl diagnose --job 4711 -o finding.html",
)
_NOBODY = "(no training job found; `probingctl diagnose --history` shows earlier findings)\n"
_EVERY_S = 2.0
_PATIENCE_S = 10.0
# Restores the cursor and the previous contents of the terminal.
_SCREEN_BACK = b"\x1b[?25h\x1b[?1049l"


@dataclass(frozen=True, slots=True)
class Options:
    finding: Annotated[
        str | None,
        typer.Argument(metavar="[FINDING_ID]", help="Show the whole page of this finding; --history lists the ids."),
    ] = None
    job: Job = None
    watch: Annotated[bool, typer.Option("--watch", help="Ask again every 2 s, until Ctrl-C.")] = False
    history: Annotated[bool, typer.Option("--history", help="Show earlier findings, also of jobs that ended.")] = False
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --history: start, how long before now, or an instant; default: 7d."),
    ] = None
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --history: the end, given as for --since.")
    ] = None
    full: Annotated[bool, typer.Option("--full", help="With --history: show the whole page of each finding.")] = False
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the facts to this file as well.")] = None
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Diagnose the facts in this file; no node is asked.")
    ] = None
    flight_recorder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Diagnose PyTorch's flight-recorder dumps in DIR; no node is asked."),
    ] = None
    skill: Annotated[Path | None, typer.Option(metavar="FILE", help="Run the SQL steps of a skill of Probing.")] = None
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the skill.")
    ] = None


def run(settings: Settings, options: Options) -> None:
    _check(options)
    _check_file(settings, options)
    during = interval(options.since or "7d", options.until)
    allow_numpy()
    if options.facts is not None:
        from probing.client.diagnosis.asking import from_file

        _finish(settings, from_file(options.facts))
    if options.flight_recorder is not None:
        from probing.client.diagnosis.asking import from_dumps

        _finish(settings, [from_dumps(options.flight_recorder)])
    # The screen does not wait for a node that does not answer in time; such a node is reported.
    with opened(replace(settings, timeout=min(settings.timeout, _PATIENCE_S))) as cluster:
        job = job_named(cluster, options.job)
        if options.finding is not None:
            from probing.client.diagnosis.history import show_finding

            show_finding(settings, cluster, options.finding, job)
            return
        if options.history:
            from probing.client.diagnosis.history import show

            show(settings, cluster, job, during, full=options.full)
            return
        if options.watch:
            _watch(settings, cluster, job)
            return
        if options.skill is not None:
            from probing.client.diagnosis.skill import run_skill

            code = run_skill(settings, cluster, options.skill, job, options.parameters or ())
        else:
            found = _found(cluster, job, options.save)
    # typer.Exit within the context would skip the context's warnings about nodes that did not answer.
    if options.skill is not None:
        raise typer.Exit(code)
    _finish(settings, found)


def _check(options: Options) -> None:
    chosen = {
        "FINDING_ID": options.finding is not None,
        "--watch": options.watch,
        "--history": options.history,
        "--facts": options.facts is not None,
        "--flight-recorder": options.flight_recorder is not None,
        "--skill": options.skill is not None,
    }
    names = [name for name, given in chosen.items() if given]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} exclude each other")
    for name, set_ in (("--since", options.since), ("--until", options.until), ("--full", options.full)):
        if set_ and not options.history:
            raise UsageError(f"{name} needs --history", hint="without --history only present findings are shown")
    if options.parameters and options.skill is None:
        raise UsageError("--set needs --skill")
    if options.save is not None and names:
        raise UsageError(f"--save and {names[0]} exclude each other")
    for name, given in (("--facts", options.facts), ("--flight-recorder", options.flight_recorder)):
        if given is not None and options.job is not None:
            raise UsageError(
                f"{name} and --job exclude each other", hint="leave --job out: all jobs in the files are shown"
            )


def _check_file(settings: Settings, options: Options) -> None:
    """Raises UsageError for an unknown suffix of -o, and for an HTML page with --watch, --history or --skill."""
    if not settings.named:
        check_suffix(settings.output, PAGES)
    rows = {"--watch": options.watch, "--history": options.history, "--skill": options.skill is not None}
    for name in (name for name, given in rows.items() if given and is_page(settings)):
        raise UsageError(
            f"{name} writes no page", hint="for the page of one finding: `probingctl diagnose FINDING_ID -o x.html`"
        )


def _found(cluster: Cluster, job: str | None, save: Path | None = None) -> list[Diagnosis]:
    from probing.client.diagnosis.asking import diagnosed, gathered, with_stored_findings
    from probing.client.render.progress import StatusLine

    with StatusLine(lambda elapsed: f"asking the nodes for facts, {elapsed:.0f} s, Ctrl-C ends it"):
        facts = gathered(cluster, job)
        if save is not None:
            from probing.diagnosis.facts_file import save as write

            write(save, facts)
        return with_stored_findings(cluster, diagnosed(facts))


def _finish(settings: Settings, found: list[Diagnosis]) -> NoReturn:
    """Writes the answer and ends with its exit code."""
    from probing.client.diagnosis.page import exit_code

    _write(settings, found, terminal_width() if settings.output is None else None)
    raise typer.Exit(exit_code(found))


def _write(settings: Settings, found: list[Diagnosis], width: int | None) -> None:
    from probing.client.diagnosis.page import as_object, flat, people

    if is_page(settings):
        write_page(settings, found)
        return
    text = people(found, width) if settings.format == "table" else ""
    write_objects(settings, as_object(found) if found else {}, text or _NOBODY, flat(found))


def _watch(settings: Settings, cluster: Cluster, job: str | None) -> None:
    if settings.output is not None:
        raise UsageError("--watch writes to stdout", hint="redirect it, or leave -o out")
    on_screen = sys.stdout.isatty() and settings.format == "table"
    with leaving_by_it(_SCREEN_BACK if on_screen else b""), _screen() if on_screen else nullcontext() as screen:
        while True:
            begun = time.monotonic()
            cluster.outcomes.clear()
            if screen is None:
                _write(settings, _found(cluster, job), None)
            else:
                screen(_frame(cluster, job))
            time.sleep(max(0.1, _EVERY_S - (time.monotonic() - begun)))


@contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """Returns a context manager that takes the whole terminal. Its value is a function that replaces the text on the
    screen.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False, markup=False), screen=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


def _frame(cluster: Cluster, job: str | None) -> str:
    from probing.client.diagnosis.asking import diagnosed, gathered, with_stored_findings
    from probing.client.diagnosis.page import people

    columns, lines = shutil.get_terminal_size((80, 24))
    title = f"probingctl diagnose  {now_text()}  (Ctrl-C ends)\n\n"
    try:
        found = with_stored_findings(cluster, diagnosed(gathered(cluster, job)))
    except ProbingError as e:
        # The daemon may be restarting; the next frame asks again.
        texts = (f"error: {e.message}", f"hint: {e.hint}" if e.hint else "")
        return title + "".join(line + "\n" for text in texts for line in wrapped(escape(text), columns))
    text = title + (people(found, columns) or _NOBODY)
    return text if text.count("\n") < lines else title + people(found, columns, brief=True)
