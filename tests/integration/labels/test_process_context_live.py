"""The process context of a real process, as a real reader reads it."""

from __future__ import annotations

import os

from otel_context import Context, process_context, resource

from probing.daemon.processes.reader_pool import ReaderPool


def test_a_context_is_found_read_once_and_read_again_when_it_changes(readers: ReaderPool) -> None:
    def ask(**known: int) -> dict[str, object]:
        return dict(readers.call("process_context", pid=os.getpid(), **known).header)

    assert ask() == {"address": 0, "published_ns": 0, "attributes": {}}
    context = Context()
    context.publish(resource({"phase": "eval", "rank": 3}))
    first = ask()
    assert (first["address"], first["attributes"]) == (context.address, {"phase": "eval", "rank": "3"})
    known = {name: first[name] for name in ("address", "published_ns")}
    assert ask(**known) == {**known, "attributes": None}  # type: ignore[arg-type]
    context.publish(process_context({"phase": "train"}, {"team": "vision"}))
    second = ask(**known)  # type: ignore[arg-type]
    assert second["attributes"] == {"phase": "train", "team": "vision"}
    assert second["published_ns"] > known["published_ns"]  # type: ignore[operator]
