"""Reintroduces faults that were mended, one at a time, into a copy of the checkout: ``make mutations``.

The gate must notice each of them: the tests named beside a fault pass as the code is, and fail with the fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ("MUTATIONS", "Mutation", "main")

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / ".build" / "mutations"
HOST = "packaging/dev/as-daemon-host.sh"


class Mutation(NamedTuple):
    """A fault: ``before`` stands once in ``file`` and becomes ``after``. ``tests``: what must notice it."""

    name: str
    file: str
    before: str
    after: str
    tests: str


_APPEND = "                self._log.append(found.batches, found.positions, found.pair)\n"
_WRITE = """\
                while self.once(due) >= MAX_DRAIN_BYTES // 2:
                    self._moved = time.monotonic()
"""
MUTATIONS = (
    Mutation(
        "a ring is committed before its record is in the log: a kill loses operations",
        "daemon/collector/drain.py",
        _APPEND,
        "                for name, end in found.ends.items():\n"
        "                    self._rings[name].commit(end)\n" + _APPEND,
        "tests/unit/collector/test_collector_drain_kills.py",
    ),
    Mutation(
        "the drain writes with the lock that whoever flushes needs",
        "daemon/collector/drain.py",
        _WRITE,
        "                with self._done:\n" + _WRITE.replace("    " * 4, "    " * 5),
        "tests/unit/collector/test_collector_drain.py",
    ),
    Mutation(
        "the end of the log that is missing is reported again by each start",
        "daemon/collector/drain.py",
        '                self._positions[name] = {**known, "position": ring.position}\n',
        "                self._positions[name] = known\n",
        "tests/unit/collector/test_collector_drain.py",
    ),
    Mutation(
        "a mismatch names the majority of the ranks",
        "diagnosis/disagreements.py",
        "        return votes.odd, False\n",
        "        return tuple(votes.groups[0][1]), False\n",
        "tests/unit/diagnosis/test_hang_mismatch.py",
    ),
    Mutation(
        "the gate parses nested constructs 2^depth times",
        "federation/sql/reading.py",
        "        if self.rereads < 0:\n",
        "        if self.rereads < -(1 << 40):\n",
        "tests/unit/query/test_query_fuzz.py",
    ),
    Mutation(
        "a SQL worker that ended while it was idle costs the next query",
        "daemon/pool.py",
        "            process.channel.close()\n        return None\n",
        '            process.channel.close()\n            raise InternalError("it has ended")\n        return None\n',
        "tests/unit/query/test_worker_pool.py::test_a_worker_that_ended_while_it_was_idle_costs_no_query",
    ),
    Mutation(
        "a SQL worker that never becomes warm is never replaced",
        "daemon/pool.py",
        "self._policy.greeting, timeout=self._policy.start_s)",
        "self._policy.greeting)",
        "tests/unit/query/test_worker_pool.py::test_a_worker_that_never_starts_is_replaced",
    ),
    Mutation(
        "a later look without stacks takes the culprit's stack from its finding",
        "daemon/diagnose/lifecycle.py",
        '            row["stacks"] = one.row["stacks"]\n',
        "            pass\n",
        "tests/unit/diagnose/test_watch.py",
    ),
    Mutation(
        "a rank that waits for the buckets of DistributedDataParallel counts as busy elsewhere",
        "diagnosis/stack_calls.py",
        "|Reducer::finalize_backward",
        "",
        "tests/unit/diagnosis/test_hang_waits.py",
    ),
    Mutation(
        "[[token]] in a comment of a token file is a KeyError",
        "daemon/service/tokens.py",
        'toml.loads(text).get("token")',
        'toml.loads(text)["token"]',
        "tests/unit/service/test_tokens.py",
    ),
    Mutation(
        "a boot finds a cycle in the order of the units and leaves some out",
        "packaging/systemd/probingd-pins.service",
        "DefaultDependencies=no\n",
        "",
        "tests/integration/supervisor/test_supervisor_units.py",
    ),
    Mutation(
        "a badly measured pair of clocks shifts records by milliseconds",
        "daemon/clock.py",
        "    return known if abs(measured - known) <= error else measured\n",
        "    return measured\n",
        "tests/unit/test_clock.py",
    ),
    Mutation(
        "a node leads a job by its word alone",
        "daemon/diagnose/coordination/proofs.py",
        "        return [one for one in claims if one.node in known.proven]\n",
        "        return claims\n",
        "tests/unit/diagnose/test_proofs.py",
    ),
    Mutation(
        "a node vouches for itself by the addresses that it says it is connected with",
        "daemon/diagnose/coordination/proofs.py",
        "        for name in known.proven:\n            add(name)\n",
        "        for name in known.sights:\n            add(name)\n",
        "tests/unit/diagnose/test_proofs.py",
    ),
    Mutation(
        "a leader that finds nothing keeps a job from being diagnosed",
        "daemon/diagnose/coordination/coordinator.py",
        "        known.still += 1\n",
        "        known.still += 0\n",
        "tests/unit/diagnose/test_taken_over_node.py",
    ),
    Mutation(
        "findings of others take the places of a node's own",
        "daemon/diagnose/lifecycle.py",
        '            return finders.count("") < _MAX_OPEN\n',
        "            return len(finders) < _MAX_OPEN\n",
        "tests/unit/diagnose/test_findings_of_others.py",
    ),
    Mutation(
        "another node closes what this node found",
        "daemon/diagnose/lifecycle.py",
        "        return bool(one.finder) and (one.finder == finder or finder < self._node)\n",
        "        return True\n",
        "tests/unit/diagnose/test_findings_of_others.py",
    ),
    Mutation(
        "a peer says when a job counts as stalled",
        "daemon/diagnose/coordination/job_facts.py",
        "        stall_s=own.stall_s,\n",
        "",
        "tests/unit/diagnose/test_peer_facts.py",
    ),
    Mutation(
        "a peer has a rank of this node",
        "daemon/diagnose/coordination/job_facts.py",
        "        ranks=tuple(rank for rank in facts.ranks if rank.rank not in known and 0 <= rank.rank < size),\n",
        "",
        "tests/unit/diagnose/test_taken_over_node.py",
    ),
    Mutation(
        "a finding of another node has the finder that it names",
        "daemon/service/received_findings.py",
        '            row["found_by"] = sender\n',
        "",
        "tests/unit/service/test_received_findings.py",
    ),
    Mutation(
        "a finding of another node names any rank",
        "daemon/service/received_findings.py",
        "                self._check(row, sender)\n",
        "",
        "tests/unit/service/test_received_findings.py",
    ),
)


def main() -> int:
    """Prints a line for each mutation; returns 1 unless the gate noticed all.

    Arguments: only mutations whose name has one of these texts.
    """
    wanted = sys.argv[1:]
    _copy()
    missed = 0
    for mutation in MUTATIONS:
        if wanted and not any(word in mutation.name for word in wanted):
            continue
        file = COPY / mutation.file
        text = file.read_text()
        assert text.count(mutation.before) == 1, f"{mutation.file} does not have this once: {mutation.before!r}"
        clean = _failed(mutation.tests)
        file.write_text(text.replace(mutation.before, mutation.after))
        failed = _failed(mutation.tests)
        file.write_text(text)
        noticed = bool(failed) and not clean
        missed += not noticed
        print(f"{'noticed' if noticed else 'MISSED'}: {mutation.name}")
        print("".join(f"    {name}\n" for name in clean or failed[:3]), end="", flush=True)
    return int(bool(missed))


def _copy() -> None:
    """Copies the files of the checkout, with its BPF objects, to COPY, and links its packages under one name."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    names = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    for name in [*names, *(path.relative_to(ROOT) for path in (ROOT / "daemon/bpf").glob("*.bpf.o"))]:
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    (COPY / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["make", "-s", "tree"], cwd=COPY, check=True)


def _failed(tests: str) -> list[str]:
    """Returns the names of the gate's tests that fail."""
    command = [HOST, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(COPY / ".build/tree")}
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    assert failed or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return failed


if __name__ == "__main__":
    sys.exit(main())
