"""``bugreport``: writes an archive without names, with which the developers of probingd can find a fault."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import PartialAnswer, ProbingError
from probing.api.numpy_import import allow_numpy
from probing.api.tables.schema import Row
from probing.api.text import size
from probing.client.render.output import replacing, write_objects
from probing.client.render.rows import dump_json
from probing.client.render.table import Field, render, terminal_width
from probing.client.session import opened, warn
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.bugreport.contents import File
    from probing.client.bugreport.gather import Gathered, Wanted
    from probing.client.cluster import Cluster
    from probing.client.wire.node import Node

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl bugreport", "probingctl bugreport --all-nodes --names names.json -o report.tar.gz")
# The maximum number of nodes in a report: each node takes up to a megabyte of memory.
MAX_NODES = 64
_PRIVATE = 0o600
_FIELDS = (Field("FILE", "name"), Field("SIZE", "bytes", size, right=True), Field("WHAT", "what", flex=True))


@dataclass(frozen=True, slots=True)
class Options:
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Log file of a daemon that does not log to the journal.")
    ] = None
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Python interpreter on the nodes whose versions are reported.")
    ] = ""
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the name behind each token to this file. Do not send it.")
    ] = None


def run(settings: Settings, options: Options) -> None:
    allow_numpy()
    from probing.client.bugreport.contents import contents, write_archive
    from probing.client.bugreport.gather import Wanted
    from probing.client.bugreport.redaction import Redactor, vocabulary

    now = int(time.time())
    with opened(replace(settings, strict=False)) as cluster:
        gathered = _gathered(cluster, Wanted(options.python, options.log))
        missing = any(outcome.failed for outcome in cluster.outcomes)
    redactor = Redactor(vocabulary())
    made = datetime.fromtimestamp(now, timezone.utc)
    files = contents(gathered, redactor, f"{made:%Y-%m-%dT%H:%M:%SZ}")
    path = settings.output or Path(f"probingd-bugreport-{_name(gathered)}-{made:%Y%m%dT%H%M%SZ}.tar.gz")
    with replacing(path, _PRIVATE) as sink:
        write_archive(sink, files, now)
    if options.names is not None:
        with replacing(options.names, _PRIVATE) as sink:
            sink.write(dump_json(redactor.names).encode())
    _show(settings, path, files, redactor.counts)
    if settings.strict and (missing or any(file.problem for file in files)):
        raise PartialAnswer("parts of the report are missing", hint="the list above says which, and why")


def _gathered(cluster: Cluster, wanted: Wanted) -> list[Gathered]:
    """Returns the answers of each node, or only those of the target if it does not list the other nodes."""
    from probing.client.bugreport.gather import add_local, gather, silent

    try:
        addresses = cluster.addresses()
    except ProbingError as e:
        # This is only a warning, because a report is needed most when the daemon does not answer.
        warn(f"{e.message}; the report covers only the target")
        addresses = (cluster.target,)
    if len(addresses) > MAX_NODES:
        warn(f"the report has {MAX_NODES} of {len(addresses):,} nodes; choose nodes with --nodes or --where")

    async def ask(node: Node, seconds: float) -> tuple[str, Gathered]:
        answer = await gather(node, seconds, wanted)
        return answer.node or node.address, answer

    cluster.outcomes.append(cluster.ask(addresses[:MAX_NODES], ask, cluster.timeout))
    answered = [one.value for one in cluster.outcomes[-1].answered]
    failed = {one.node or one.address: one.reason for outcome in cluster.outcomes for one in outcome.failed}
    gathered = [*answered, *(silent(address, reason) for address, reason in failed.items())]
    for one in gathered:
        add_local(one, wanted, alone=len(gathered) == 1)
    return gathered


def _name(gathered: Sequence[Gathered]) -> str:
    if len(gathered) > 1:
        return f"{len(gathered)}-nodes"
    node = gathered[0].node if gathered else ""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", node or socket.gethostname())[:100]


def _show(settings: Settings, path: Path, files: Sequence[File], replaced: Mapping[str, int]) -> None:
    rows: list[Row] = [
        {"name": file.name, "bytes": len(file.data), "what": file.about, "problem": file.problem or None}
        for file in files
    ]
    shown = [{**row, "what": row["problem"] or row["what"]} for row in rows]
    names = ", ".join(f"{kind} {count}" for kind, count in sorted(replaced.items()))
    text = (
        f"{path}, {size(path.stat().st_size)}, readable only by its owner\n\n"
        f"{render(_FIELDS, shown, terminal_width())}\n"
        f"Different names replaced by tokens: {names}.\n"
        f"Read it before you send it: tar -xzOf {path} | less\n"
    )
    report = {"file": str(path), "bytes": path.stat().st_size, "contents": rows, "replaced": dict(replaced)}
    write_objects(replace(settings, output=None), report, text, rows)
