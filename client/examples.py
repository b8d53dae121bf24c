"""What ``--help`` shows below the options of each command: how it is used."""

from __future__ import annotations

import typer

__all__ = ("add_examples",)

_GENERAL = "Every command also takes -t, -f, -o, --all-nodes and what else `probingctl --help` lists."
_EXAMPLES = {
    "ps": ("probingctl ps --all-nodes", "probingctl ps --job 4711 --ended"),
    "list": ("probingctl cluster list --job 4711",),
    "events": ("probingctl events --job 4711 --since 2h",),
    "top": ("probingctl top --all-nodes --job 4711", "probingctl top --once"),
    "nccl": ("probingctl nccl --all-nodes --job 4711", "probingctl nccl --job 29500 --since 1h -f json"),
    "logs": ("probingctl logs --job 4711 --kind nan --follow",),
    "tables": ("probingctl tables", "probingctl tables comm.ops"),
    "status": ("probingctl status --all-nodes",),
    "nodes": ("probingctl nodes",),
    "rdma": ("probingctl rdma mlx5_0 --seconds 5",),
    "pause": ("probingctl pause", "probingctl pause --resume"),
    "version": ("probingctl version",),
    "stacks": ("probingctl stacks --job 4711 --merge --all-nodes", "probingctl stacks 31337 --native --locals"),
    "vars": ("probingctl vars --job 4711 step loss", "probingctl vars --job 4711 --watch loss --for 1h"),
    "profile": (
        "probingctl profile --job 4711 --rank 7 --diff rank:0",
        "probingctl profile 31337 --seconds 30 -o profile.svg",
    ),
    "flamegraph": ("probingctl flamegraph --job 4711 --since 10m -o job.svg",),
    "config": ("probingctl config", "probingctl config sampling.hz=99 --job 4711 --for 10m"),
    "query": (
        'probingctl query "SELECT op, count(*) FROM comm.ops GROUP BY op"',
        'probingctl query --param j=4711 "SELECT * FROM comm.inflight WHERE job = $j"',
    ),
    "export": ("probingctl export --since 2h --job 4711 -o DIR", "probingctl export --tables comm.ops -o ops.parquet"),
}


_EXAMPLES |= dict.fromkeys(("backtrace", "bt"), _EXAMPLES["stacks"])


def add_examples(*apps: typer.Typer) -> None:
    """Gives each command of ``apps`` its examples."""
    for app in apps:
        for command in app.registered_commands:
            assert command.callback is not None
            name = command.name or command.callback.__name__
            if lines := _EXAMPLES.get(name):
                # \b keeps lines as they are.
                command.epilog = "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)]) + "\n\n" + _GENERAL
