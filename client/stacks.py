"""``stacks``: what every thread of the chosen processes executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from probing.api.errors import NotFound, error_from
from probing.client.output import write_objects
from probing.client.session import opened, warn
from probing.client.settings import Settings
from probing.client.text import escape

__all__ = ("run",)


def run(settings: Settings, pids: Sequence[int], job: str) -> None:
    with opened(settings) as cluster:
        found = cluster.stacks(pids, job)
        threads = sorted(found.threads, key=_order)
        if not threads and found.failures:
            first = found.failures[0]
            raise error_from(first["kind"], _failure(first), first["hint"])
        for failure in found.failures:
            warn(_failure(failure))
        if not threads and (pids or job):
            wanted = f"job {job}" if job else f"pid {', '.join(map(str, pids))}"
            raise NotFound(f"no thread of {wanted} was found", hint="`probingctl ps` lists the processes that run now")
        write_objects(settings, threads, _people(threads), list(_flat(threads)))


def _order(thread: dict[str, Any]) -> tuple[Any, ...]:
    rank = thread["rank"]
    main_first = thread["tid"] != thread["pid"]
    return (thread["job"], rank is None, rank or 0, thread["node"], thread["pid"], main_first, thread["tid"])


def _failure(failure: dict[str, Any]) -> str:
    rank = "" if failure["rank"] is None else f" (rank {failure['rank']})"
    return f"pid {failure['pid']}{rank} on {failure['node']}: {failure['reason']}"


def _people(threads: Sequence[dict[str, Any]]) -> str:
    if not threads:
        return "(no training process)\n"
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
    for frame in thread["frames"]:
        where = frame["file"] if frame["lineno"] is None else f"{frame['file']}:{frame['lineno']}"
        native = " [native]" if frame["frame_type"] == "Native" else ""
        yield escape(f"    {frame['func']} ({where}){native}")
    if not thread["frames"]:
        yield "    (no Python frame)"


def _flat(threads: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for thread in threads:
        own = {key: value for key, value in thread.items() if key != "frames"}
        for depth, frame in enumerate(thread["frames"]):
            yield {**own, "depth": depth, **frame}
