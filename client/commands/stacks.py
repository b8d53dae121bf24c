"""``stacks``: what every thread of the chosen processes executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from probing.api.errors import NotFound, UsageError, error_from
from probing.client.merge import merge, plain_groups
from probing.client.render.merged_stacks import frame_text, people
from probing.client.render.output import write_objects
from probing.client.render.text import escape
from probing.client.session import job_named, opened, warn
from probing.client.settings import Settings

__all__ = ("NOBODY", "failure_text", "run", "variable_text")

NOBODY = "(no training process)\n"


def run(
    settings: Settings, pids: Sequence[int], job: str, *, native: bool, local_variables: bool, merged: str | None
) -> None:
    """``merged``: None for every stack alone, else which threads are merged over the ranks, "main" or "all"."""
    if merged is not None and local_variables:
        raise UsageError("--merge compares stacks and shows no variables", hint="leave out --locals or --merge")
    with opened(settings) as cluster:
        job = job_named(cluster, job)
        found = cluster.stacks(pids, job, native=native, local_variables=local_variables)
        threads = sorted(found.threads, key=_order)
        if not threads and found.failures:
            first = found.failures[0]
            raise error_from(first["kind"], failure_text(first), first["hint"])
        for failure in found.failures:
            warn(failure_text(failure))
        if not threads and (pids or job):
            wanted = f"job {job}" if job else f"pid {', '.join(map(str, pids))}"
            raise NotFound(f"no thread of {wanted} was found", hint="`probingctl ps` lists the processes that run now")
        if merged is None:
            write_objects(settings, threads, _people(threads), list(_flat(threads)))
        else:
            _write_merged(settings, threads, every_thread=merged == "all")


def _write_merged(settings: Settings, threads: Sequence[dict[str, Any]], *, every_thread: bool) -> None:
    groups = merge(threads, every_thread=every_thread)
    for missing in dict.fromkeys(t["native_missing"] for t in threads if t.get("native_missing")):
        warn(f"native frames are missing: {missing}")
    plain = plain_groups(groups)
    write_objects(settings, plain, people(groups) or NOBODY, list(_flat_groups(plain)))


def _order(thread: dict[str, Any]) -> tuple[Any, ...]:
    rank = thread["rank"]
    main_first = thread["tid"] != thread["pid"]
    return (thread["job"], rank is None, rank or 0, thread["node"], thread["pid"], main_first, thread["tid"])


def failure_text(failure: dict[str, Any]) -> str:
    """A process that could not be read, and why, on one line."""
    rank = "" if failure["rank"] is None else f" (rank {failure['rank']})"
    return f"pid {failure['pid']}{rank} on {failure['node']}: {failure['reason']}"


def _people(threads: Sequence[dict[str, Any]]) -> str:
    if not threads:
        return NOBODY
    lines: list[str] = []
    process: tuple[Any, ...] | None = None
    for thread in threads:
        own = (thread["node"], thread["pid"])
        if own != process:
            process = own
            lines.extend(["", _head(thread)] if lines else [_head(thread)])
        lines.extend(_thread(thread))
    return "\n".join(lines) + "\n"


def _head(thread: dict[str, Any]) -> str:
    rank = "no rank" if thread["rank"] is None else f"rank {thread['rank']}"
    return escape(f"{rank}  pid {thread['pid']}  node {thread['node']}  job {thread['job']}")


def _thread(thread: dict[str, Any]) -> Iterator[str]:
    marks = [thread["state"], *(["holds the GIL"] if thread["gil"] else [])]
    if not thread["complete"]:
        marks.append("incomplete: it changed while it was read, or was cut")
    name = thread["thread"] or "(unnamed)"
    yield escape(f"  thread {thread['tid']} {name} [{', '.join(m for m in marks if m)}]")
    if thread.get("native_missing"):
        yield escape(f"    native frames are missing: {thread['native_missing']}")
    for frame in thread["frames"]:
        yield escape(f"    {frame_text(frame['func'], frame['file'], frame['lineno'], frame['frame_type'])}")
        yield from (escape(f"        {variable_text(v)}") for v in frame.get("locals", ()))
    if not thread["frames"]:
        yield "    (no Python frame)"


def variable_text(variable: dict[str, Any]) -> str:
    """``name: type = value``, or why there is no value."""
    kind = f": {variable['type']}" if variable["type"] else ""
    if variable["value"] is None:
        return f"{variable['name']}{kind} ({variable['reason'] or 'not known'})"
    return f"{variable['name']}{kind} = {variable['value']}"


def _flat(threads: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for thread in threads:
        own = {key: value for key, value in thread.items() if key != "frames"}
        for depth, frame in enumerate(thread["frames"]):
            yield {**own, "depth": depth, **frame}


def _flat_groups(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a node, in the order of the tree; depth 0 is the outermost frame."""
    for group in groups:
        waiting = [(0, child) for child in reversed(group["children"])]
        while waiting:
            depth, node = waiting.pop()
            own = {key: value for key, value in node.items() if key != "children"}
            yield {"job": group["job"], "thread": group["thread"], "depth": depth, **own}
            waiting += [(depth + 1, child) for child in reversed(node["children"])]
