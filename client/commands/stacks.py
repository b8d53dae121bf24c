"""``stacks``: shows Python stacks of the threads of the chosen processes, one by one or merged over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from probing.api.errors import NotFound, UsageError
from probing.api.text import escape
from probing.client.messages import Thread, Variable
from probing.client.options import Job, Pids
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.session import job_named, opened, report_failures, warn
from probing.client.settings import Settings, process_id
from probing.client.stacks.merge import PlainGroup, merge, plain_groups
from probing.client.stacks.text import frame_text, telling, trees_text, without_frames

__all__ = ("EXAMPLES", "Options", "in_order", "run")

EXAMPLES = ("probingctl stacks --job 4711 --merge --all-nodes", "probingctl stacks 31337 --native --locals")
_NOBODY = "(no training process)\n"


@dataclass(frozen=True, slots=True)
class Options:
    pids: Pids = None
    job: Job = None
    native: Annotated[bool, typer.Option("--native", help="With the frames of C and C++ code.")] = False
    show_locals: Annotated[bool, typer.Option("--locals", help="With the local variables of each frame.")] = False
    merge: Annotated[bool, typer.Option("--merge", help="Equal stacks of a job's ranks as one tree.")] = False
    threads: Annotated[str | None, typer.Option(metavar="main|all", help="With --merge: main (default) or all.")] = None


def run(settings: Settings, options: Options) -> None:
    _check(options)
    pids = [process_id(text) for text in options.pids or ()]
    with opened(settings) as cluster:
        job = job_named(cluster, options.job or "")
        found = cluster.stacks(pids, job, native=options.native, local_variables=options.show_locals)
        threads = in_order(found.threads)
        report_failures(found.failures, all_failed=not threads)
        if not threads and (pids or job):
            wanted = f"job {job}" if job else f"pid {', '.join(map(str, pids))}"
            raise NotFound(f"no thread of {wanted} was found", hint="`probingctl ps` lists the processes that run now")
        if options.merge:
            _write_merged(settings, threads, every_thread=options.threads == "all")
        else:
            write_objects(settings, threads, _text(threads), list(_flat(threads)))


def _check(options: Options) -> None:
    if options.threads not in (None, "main", "all"):
        raise UsageError(f"--threads {options.threads} is neither main nor all")
    if options.threads is not None and not options.merge:
        raise UsageError("--threads needs --merge", hint="without --merge all threads are shown")
    if options.merge and options.show_locals:
        raise UsageError("--merge compares stacks and shows no variables", hint="leave out --locals or --merge")


def _write_merged(settings: Settings, threads: Sequence[Thread], *, every_thread: bool) -> None:
    people_read = settings.format == "table"
    told: list[Thread] = [{**thread, "frames": telling(thread["frames"])} for thread in threads] if people_read else []
    groups = merge(told or threads, every_thread=every_thread)
    for missing in dict.fromkeys(t["native_missing"] for t in threads if t.get("native_missing")):
        warn(f"native frames are missing: {missing}")
    plain = plain_groups(groups)
    write_objects(settings, plain, trees_text(groups) or _NOBODY, list(_flat_groups(plain)))


def in_order(threads: Sequence[Thread]) -> list[Thread]:
    """Returns ``threads`` by job, rank and process, the main thread of each first."""
    return sorted(threads, key=_order)


def _order(thread: Thread) -> tuple[Any, ...]:
    rank = thread["rank"]
    main_first = thread["tid"] != thread["pid"]
    return (thread["job"], rank is None, rank or 0, thread["node"], thread["pid"], main_first, thread["tid"])


def _text(threads: Sequence[Thread]) -> str:
    if not threads:
        return _NOBODY
    processes: dict[tuple[Any, ...], list[Thread]] = {}
    for thread in threads:
        processes.setdefault((thread["node"], thread["pid"]), []).append(thread)
    texts = []
    for own in processes.values():
        # Libraries and data loaders have many threads without frames.
        empty = [thread for thread in own if _says_nothing(thread)]
        lines = [_head(own[0]), *(line for thread in own if thread not in empty for line in _thread(thread))]
        if text := without_frames((thread["thread"] or "(unnamed)", 1) for thread in empty):
            lines.append(escape(f"  {text}"))
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def _says_nothing(thread: Thread) -> bool:
    """Returns whether the thread is not a main thread and has neither a frame nor a reason why frames are missing."""
    told = thread["frames"] or thread.get("native_missing") or thread["gil"] or not thread["complete"]
    return thread["tid"] != thread["pid"] and not told


def _head(thread: Thread) -> str:
    rank = "no rank" if thread["rank"] is None else f"rank {thread['rank']}"
    return escape(f"{rank}  pid {thread['pid']}  node {thread['node']}  job {thread['job']}")


def _thread(thread: Thread) -> Iterator[str]:
    marks = [thread["state"], *(["holds the GIL"] if thread["gil"] else [])]
    if not thread["complete"]:
        marks.append("incomplete: the stack changed while it was read, or was cut")
    name = thread["thread"] or "(unnamed)"
    yield escape(f"  thread {thread['tid']} {name} [{', '.join(m for m in marks if m)}]")
    if thread.get("native_missing"):
        yield escape(f"    native frames are missing: {thread['native_missing']}")
    for frame in telling(thread["frames"]):
        yield escape(f"    {frame_text(frame['func'], frame['file'], frame['lineno'], frame['frame_type'])}")
        yield from (escape(f"        {_variable(v)}") for v in frame.get("locals", ()))
    if not thread["frames"]:
        yield "    (no Python frame)"


def _variable(variable: Variable) -> str:
    """Returns ``name: type = value``, or the reason why there is no value."""
    kind = f": {variable['type']}" if variable["type"] else ""
    if variable["value"] is None:
        return f"{variable['name']}{kind} ({variable['reason'] or 'not known'})"
    return f"{variable['name']}{kind} = {variable['value']}"


def _flat(threads: Sequence[Thread]) -> Iterator[Row]:
    for thread in threads:
        own = {key: value for key, value in thread.items() if key != "frames"}
        for depth, frame in enumerate(thread["frames"]):
            yield {**own, "depth": depth, **frame}


def _flat_groups(groups: Sequence[PlainGroup]) -> Iterator[Row]:
    """Yields a row for each node of the trees, parents first; depth 0 is the outermost frame."""
    for group in groups:
        waiting = [(0, child) for child in reversed(group["children"])]
        while waiting:
            depth, node = waiting.pop()
            own = {key: value for key, value in node.items() if key != "children"}
            yield {"job": group["job"], "thread": group["thread"], "depth": depth, **own}
            waiting += [(depth + 1, child) for child in reversed(node["children"])]
