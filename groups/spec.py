"""The specification of a group: its workers, command and policies, as its owner signs it; and its rank table."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from probing.api.errors import UsageError
from probing.api.text import encoded, escape, listed, plural
from probing.api.typed import typed_json
from probing.diagnosis.ranks import DEFAULT_PORT, Worker, launched

__all__ = (
    "GIVEN",
    "MAX_GROUPS",
    "MAX_S",
    "MAX_SPEC",
    "MAX_WORKERS",
    "NAME",
    "PORTS",
    "OnHang",
    "Restart",
    "Spec",
    "checked",
    "environment",
    "is_worker",
    "node_of",
    "table",
)

Restart = Literal["never", "on_failure", "always"]
OnHang = Literal["report", "restart", "restart_without_node"]
MAX_SPEC = 192 << 10
MAX_WORKERS = 16_384
# The maximum number of groups of a node, and of a launcher. Both also remember deleted groups, which count.
MAX_GROUPS = 1024
# The number of ports that a group tries, from the port in the specification upwards; it uses the first free port.
PORTS = 64
# Limits of texts, in bytes: the kernel passes no argument or variable of more than 128 KiB to a program.
_MAX_WORDS, _MAX_WORD, _MAX_VARIABLES, _MAX_TEXT = 1024, 64 << 10, 256, 128 << 10
MAX_S = 3600.0
_MAX_RESTARTS, _MAX_VERSION, _MAX_UID, _MAX_LOG = 100, 1 << 53, 1 << 32, 1 << 40
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ID = re.compile(r"[A-Za-z0-9]{0,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
GIVEN = frozenset(
    (
        "BACKEND",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PROBING_GROUP",
        "PROBING_SAVE_PIDS",
        "PROBING_WORKER",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "WORLD_SIZE",
    )
)
"""The variables that a launcher sets; a specification must not set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a group runs.

    ``id``: a random string, chosen when the group is created, so that two groups of the same name are never confused.
    ``version``: grows by 1 with each change. ``owner`` and ``uid``: the user who signed the specification, on the node
    ``signed_on``. ``workers``: names ``NODE-N``. ``master``: a worker, or the node of a worker. ``world_size`` None:
    the number of workers. ``max_restarts``: the maximum number of automatic restarts within an hour. ``min_nodes``
    above 0: the group is started again without a node that failed, if at least this number of nodes is left.
    ``grace_s``: time between SIGTERM and SIGKILL. ``fence_s``: if a launcher has not heard from a majority of the
    group's nodes for this long, it ends its own ranks; this holds only if the group may be started again without the
    launcher's node (``fenced``). ``save``: a command that runs on each node before an automatic restart, for at most
    ``save_s``, or SIGUSR1: the ranks get this signal instead. ``log_bytes``: the size at which the log of a rank is
    rotated.
    """

    name: str
    version: int
    owner: str
    uid: int
    signed_on: str
    workers: tuple[str, ...]
    master: str
    command: tuple[str, ...]
    id: str = ""
    world_size: int | None = None
    master_port: int = DEFAULT_PORT
    backend: str = "nccl"
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    restart: Restart = "never"
    max_restarts: int = 3
    on_hang: OnHang = "report"
    min_nodes: int = 0
    grace_s: float = 10.0
    fence_s: float = 60.0
    save: tuple[str, ...] = ()
    save_s: float = 60.0
    log_bytes: int = 64 << 20

    @property
    def fenced(self) -> bool:
        """Whether the group may be started without a node that does not answer."""
        return self.on_hang == "restart_without_node" or self.min_nodes > 0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Spec:
        """Returns the specification in ``data``. Raises UsageError if it is malformed or breaks a rule."""
        if len(data) > MAX_SPEC:
            raise UsageError(f"the specification of a group has {len(data):,} bytes", hint=f"at most {MAX_SPEC:,}")
        try:
            spec = typed_json(cls, data)
        except ValueError as e:
            raise UsageError(f"the specification of a group is malformed: {escape(str(e), 200)}") from None
        checked(spec)
        return spec


def checked(spec: Spec) -> Spec:
    """Returns ``spec``. Raises UsageError, which names the broken rule, if a launcher could not start ``spec``."""
    for problem, hint in (
        *_names(spec),
        *_command(spec),
        *_environment(spec.env),
        *_numbers(spec),
    ):
        raise UsageError(f"group {escape(spec.name, 64)}: {problem}", hint=hint)
    table(spec)
    return spec


def table(spec: Spec, excluded: Collection[str] = (), *, address: str = "", port: int = 0) -> list[Worker]:
    """Returns the workers that run, in the order of their ranks.

    The master's node comes first, the other nodes in alphabetical order, the workers of a node by number. ``excluded``:
    nodes that are left out; if the master's node is among them, the first other node takes its place. ``address`` and
    ``port``: where the master listens; empty and 0: the master's node and the port of the specification. Raises
    UsageError.
    """
    left = [worker for worker in spec.workers if node_of(worker) not in excluded]
    if not left:
        raise UsageError(f"group {spec.name}: no node is left", hint="exclude fewer nodes")
    master = spec.master
    if master not in left and master not in set(map(node_of, left)):
        if not excluded:
            raise UsageError(
                f"group {spec.name}: the master {escape(master, 80)} is not among the workers {listed(left[:8])}",
                hint="name a worker, or the node of a worker, by --master",
            )
        master = min(map(node_of, left))
    try:
        ranks = launched(left, master, port or spec.master_port)
    except ValueError as e:
        raise UsageError(f"group {spec.name}: {escape(str(e), 200)}", hint="workers are named NODE-N") from None
    size = len(ranks) if spec.world_size is None else min(spec.world_size, len(ranks))
    chosen = ranks[:size]
    return [
        replace(rank, world_size=size, backend=spec.backend, master_addr=address or rank.master_addr) for rank in chosen
    ]


def environment(spec: Spec, ranks: Sequence[Worker], worker: Worker, generation: int, restarts: int) -> dict[str, str]:
    """Returns the variables that ``worker``, one of ``ranks``, gets in addition to the variables of the launcher
    itself.

    These are the variables of torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py), NODE_RANK and
    BACKEND. The daemon takes the job from TORCHELASTIC_RUN_ID. ``restarts``: restarts since the owner's last order.
    """
    local_size = sum(rank.node == worker.node for rank in ranks)
    nodes = len({rank.node for rank in ranks})
    return {
        **spec.env,
        "BACKEND": spec.backend,
        "GROUP_RANK": str(worker.node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": worker.master_addr,
        "MASTER_PORT": str(worker.master_port),
        "NODE_RANK": str(worker.node_rank),
        "PROBING_GROUP": f"{spec.name}/{generation}",
        "PROBING_WORKER": worker.worker,
        "RANK": str(worker.rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(worker.rank),
        "ROLE_WORLD_SIZE": str(worker.world_size),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": spec.name,
        # The ranks use the store of rank 0. The launcher may have been started by a torchrun, which has another store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "WORLD_SIZE": str(worker.world_size),
    }


def is_worker(name: str) -> bool:
    """Returns whether ``name`` has the form NODE-N."""
    node, _, number = name.rpartition("-")
    return bool(NAME.fullmatch(node) and _NUMBER.fullmatch(number))


def node_of(worker: str) -> str:
    """Returns the node of a worker ``NODE-N``."""
    return worker.rpartition("-")[0]


_Problem = tuple[str, str]


def _names(spec: Spec) -> list[_Problem]:
    problems: list[_Problem] = []
    if not NAME.fullmatch(spec.name):
        problems.append(("this is not a valid name", "a name has letters, digits, ., _ and -, at most 63"))
    if not 0 < len(spec.workers) <= MAX_WORKERS:
        problems.append((f"it has {plural(len(spec.workers), 'worker')}", f"give 1 to {MAX_WORKERS:,} workers"))
    if wrong := [worker for worker in spec.workers if not is_worker(worker)]:
        problems.append((f"{escape(wrong[0], 80)} is not a worker", "workers are named NODE-N, as in gn6-0"))
    worker, number = Counter(spec.workers).most_common(1)[0] if spec.workers else ("", 1)
    if number > 1:
        problems.append((f"worker {escape(worker, 80)} occurs twice", "name each worker once"))
    folded: dict[str, str] = {}
    for node in map(node_of, spec.workers):
        if (other := folded.setdefault(node.casefold(), node)) != node:
            problems.append((f"nodes {other} and {node} differ only in case", "use one spelling of each node"))
            break
    return problems


def _command(spec: Spec) -> list[_Problem]:
    problems: list[_Problem] = []
    for what, words in (("command", spec.command), ("command before a restart", spec.save)):
        sizes = [len(encoded(word)) for word in words]
        if len(words) > _MAX_WORDS or sum(sizes) > _MAX_TEXT or max(sizes, default=0) > _MAX_WORD:
            most = f"at most {_MAX_WORDS:,} words and {_MAX_TEXT:,} bytes, {_MAX_WORD:,} a word"
            problems.append((f"its {what} is too long", most))
        problems += [(f"its {what} {problem}", "leave it out") for problem in map(_text_problem, words) if problem]
    if not spec.command or not spec.command[0]:
        problems.append(("it has no command", "give it behind --, as in: -- python train.py"))
    if spec.save and not spec.save[0]:
        problems.append(("its command before a restart is empty", "give --save COMMAND, or SIGUSR1"))
    if spec.cwd and (not spec.cwd.startswith("/") or len(spec.cwd) > 4096 or _text_problem(spec.cwd)):
        problems.append(("its directory is not an absolute path", "give --cwd /PATH"))
    return problems


def _environment(env: Mapping[str, str]) -> list[_Problem]:
    problems: list[_Problem] = []
    sizes = [len(encoded(name)) + len(encoded(value)) for name, value in env.items()]
    if len(env) > _MAX_VARIABLES or sum(sizes) > _MAX_TEXT or max(sizes, default=0) > _MAX_WORD:
        most = f"at most {_MAX_VARIABLES} variables and {_MAX_TEXT:,} bytes, {_MAX_WORD:,} a variable"
        problems.append(("its environment is too large", most))
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            problems.append(
                (
                    f"{escape(name, 80)!r} is not a valid variable name",
                    "use letters, digits and _, and do not begin with a digit",
                )
            )
        elif name in GIVEN:
            problems.append((f"{name} is set by the launcher", "leave it out of --env"))
        elif problem := _text_problem(value):
            problems.append((f"the value of {name} {problem}", "leave it out"))
    return problems


def _text_problem(text: str) -> str:
    if "\0" in text:
        return "has a zero byte, which no program can be given"
    # The tables of groups cannot hold a surrogate.
    return "" if encoded(text).decode() == text else "has a character that is not Unicode"


def _numbers(spec: Spec) -> list[_Problem]:
    problems: list[_Problem] = []
    nodes = len(set(map(node_of, spec.workers)))
    if spec.world_size is not None and not 1 <= spec.world_size <= len(spec.workers):
        problems.append(
            (
                f"it has a world size of {spec.world_size} with {plural(len(spec.workers), 'worker')}",
                "add workers, or give a smaller --world-size",
            )
        )
    if not 1 <= spec.master_port <= 65_535:
        problems.append((f"{spec.master_port} is not a port", "give a --master-port from 1 to 65535"))
    if not NAME.fullmatch(spec.backend):
        problems.append(("its backend has no valid name", "give --backend nccl or gloo"))
    if not 0 <= spec.max_restarts <= _MAX_RESTARTS:
        problems.append((f"it allows {spec.max_restarts} restarts an hour", f"give 0 to {_MAX_RESTARTS}"))
    if not 0 <= spec.min_nodes <= nodes:
        problems.append(
            (f"it needs at least {spec.min_nodes} of {plural(nodes, 'node')}", "give fewer by --nnodes MIN:MAX")
        )
    for name, value in (("grace", spec.grace_s), ("fence", spec.fence_s), ("save", spec.save_s)):
        if not (math.isfinite(value) and 0 < value <= MAX_S):
            problems.append((f"its {name} time is {value} s", f"give up to {MAX_S:g} s"))
    if not 4096 <= spec.log_bytes <= _MAX_LOG:
        problems.append((f"its logs are rotated at {spec.log_bytes} bytes", f"give 4096 to {_MAX_LOG}"))
    owned = 0 < len(spec.owner) <= 64 and spec.owner.isprintable() and 0 <= spec.uid < _MAX_UID
    if not (owned and 1 <= spec.version < _MAX_VERSION and NAME.fullmatch(spec.signed_on) and _ID.fullmatch(spec.id)):
        problems.append(("its owner, version or node is malformed", "make it by `probingctl group create`"))
    return problems
