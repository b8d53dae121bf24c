"""Launchers as processes, the owner's records for them, and what an observer sees in /proc."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from waiting import until

from probing.groups.group import Group, created, order_of
from probing.groups.keys import OwnerKey
from probing.groups.spec import Spec

__all__ = ("NODE", "LauncherProcess", "Owner", "end", "living", "workers")

NODE = "n1"
_CHILD = str(Path(__file__).with_name("launcher_child.py"))


def workers(number: int, node: str = NODE) -> tuple[str, ...]:
    return tuple(f"{node}-{n}" for n in range(number))


class Owner:
    """The owner of a group, and the cluster that agrees on its record."""

    def __init__(self, directory: Path, name: str, *command: str, number: int = 5, **fields: Any) -> None:
        self.key = OwnerKey.of_user(directory / "keys")
        self._now_ns = 1_000_000_000
        defaults = {
            "version": 1,
            "owner": "root",
            "uid": os.getuid(),
            "signed_on": NODE,
            "workers": workers(number),
            "master": NODE,
            "grace_s": 30.0,
        }
        spec = Spec(name=name, command=command, **{**defaults, **fields})
        self.group = created(spec, self.key)

    def now(self) -> int:
        self._now_ns += 1_000_000_000
        return self._now_ns

    def change(self, **fields: Any) -> Group:
        """Returns the record with a new version of the specification."""
        spec = self.group.spec
        self.group = self.group.renewed(created(replace(spec, version=spec.version + 1, **fields), self.key))
        return self.group

    def order(self, action: Any) -> Group:
        ordered = self.group.ordered(order_of(self.group, action, self.key), self.now())
        self.group = replace(ordered, address="127.0.0.1")
        return self.group

    def restart(self, cause: str = "failure") -> Group:
        """Returns the record after a restart without an order."""
        group = self.group.restarted(cause, "rank 1 ended", self.now())
        assert group is not None
        self.group = group
        return group

    def run(self) -> Group:
        """Returns the record after older processes have ended."""
        self.group = self.group.running(self.now())
        return self.group


class LauncherProcess:
    """A launcher in a process of its own."""

    def __init__(
        self,
        directory: Path,
        number: int = 5,
        *,
        node: str = NODE,
        allow: tuple[str, ...] = (),
        die_at: int = 0,
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        inherits: tuple[int, ...] = (),
    ) -> None:
        words = [
            *before,
            sys.executable,
            _CHILD,
            str(directory),
            node,
            " ".join(workers(number, node)),
            json.dumps(allow),
        ]
        env = {**os.environ, **(env or {}), "DIE_AT": str(die_at)}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, pass_fds=inherits
        )
        self.problem = ""

    def ready(self) -> LauncherProcess:
        self.problem = self._answer()
        return self

    def __enter__(self) -> LauncherProcess:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the launcher by closing its input; ranks run on."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def ask(self, op: str, **fields: Any) -> Any:
        """Returns the answer to an order. Raises EOFError if the launcher has ended."""
        self.tell(op, **fields)
        return self._answer()

    def tell(self, op: str, **fields: Any) -> None:
        try:
            self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None

    def reexec(self) -> None:
        self.tell("reexec")
        self.ready()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def apply(self, group: Group) -> str:
        return self.ask("apply", group=group.to_json().decode())

    def rows(self) -> list[dict[str, Any]]:
        return self.ask("report")

    def until(self, condition: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        """Returns the report once ``condition`` of it holds."""
        rows: list[dict[str, Any]] = []

        def holds() -> bool:
            rows[:] = self.rows()
            return bool(condition(rows))

        until(holds, what=lambda: f"a state other than {rows}")
        return rows

    def until_states(self, state: str) -> list[dict[str, Any]]:
        return self.until(lambda rows: {row["state"] for row in rows} == {state})

    def start(self, owner: Owner) -> list[dict[str, Any]]:
        """Starts the group by an order; returns the rows of its ranks, which run."""
        assert self.apply(owner.order("start")) == ""
        assert self.apply(owner.run()) == ""
        return self.until_states("running")

    def stop(self, owner: Owner) -> list[dict[str, Any]]:
        """Stops the group; returns the rows once no process is left."""
        assert self.apply(owner.order("stop")) == ""
        return self.until(lambda rows: all(row["clear"] and row["seen"] == owner.group.generation for row in rows))


def living(group: str) -> dict[int, tuple[int, int]]:
    """Returns the living processes of a group by pid: generation and RANK in their environments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v)
            name, _, generation = variables.get(b"PROBING_GROUP", b"").decode().rpartition("/")
            # A zombie has no environment.
            if name == group:
                found[int(entry.name)] = (int(generation), int(variables[b"RANK"]))
    return found


def end(group: str) -> None:
    """Ends what is left of a group."""
    for pid in living(group):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
