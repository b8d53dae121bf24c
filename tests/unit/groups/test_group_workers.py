"""The launchers of a node: who may serve which workers, what counts of their reports, and what waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
from fakes import Now
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import SERVED, FormatError, Overloaded, PrivilegeError, ProbingError, UsageError
from probing.daemon.arrow import batch_of
from probing.daemon.groups.workers import Launcher, Workers
from probing.groups.report import MAX_ROWS, WorkerRow, rows_from, rows_json

ADA, BOB = 1000, 1001
SUSPECT_S, FAILED_S, FORGOTTEN_S = 5.0, 10.0, 86_400.0


@pytest.fixture
def now() -> Now:
    return Now(1000.0)


@pytest.fixture
def workers(now: Now) -> Workers:
    return Workers("gn6", SUSPECT_S, FAILED_S, now, lambda: 1_800_000_000_000_000_000)


def join(workers: Workers, *names: str, uid: int = ADA, pid: int = 7) -> Launcher:
    return workers.join(uid, "ada" if uid == ADA else "bob", names, pid, "0.1.0")


def row(worker: str = "gn6-0", group: str = "llama", **fields: Any) -> WorkerRow:
    known: dict[str, Any] = {"generation": 1, "seen": 1, "clear": True, "state": "running"}
    return WorkerRow(worker, group, **{**known, **fields})


def states(workers: Workers) -> dict[str, str]:
    return {row["worker"]: row["state"] for row in workers.rows()}


@pytest.mark.parametrize(
    "name",
    [
        "gn7-0",
        "gn66-0",
        "GN6-0",
        "gn6",
        "gn6-",
        "gn6-00",
        "gn6--1",
        "gn6-0x",
        "gn6-\u0663",
        "gn6-\u00b2",
        "gn6-0\n",
        "gn6-1-0",
        "gn6-1234567890",
        "",
        "\x1b[2J-0",
        "gn6-" + "1" * 1000,
    ],
)
def test_a_name_that_is_no_worker_of_the_node(workers: Workers, name: str) -> None:
    with pytest.raises(UsageError, match="is no worker of node gn6") as refused:
        join(workers, "gn6-0", name)
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 200
    assert states(workers) == {}


def test_the_number_of_names_is_bounded(workers: Workers) -> None:
    for names in ((), ("gn6-0", "gn6-0"), tuple(f"gn6-{number}" for number in range(257))):
        with pytest.raises(UsageError):
            join(workers, *names)
    join(workers, *(f"gn6-{number}" for number in range(256)))


def test_a_node_with_a_long_name_has_workers() -> None:
    workers = Workers("n" * 63, SUSPECT_S, FAILED_S)
    assert join(workers, "n" * 63 + "-255").workers == ("n" * 63 + "-255",)


def test_the_number_of_launchers_is_bounded(workers: Workers, now: Now) -> None:
    first, *_ = [join(workers, f"gn6-{number}") for number in range(64)]
    # Whoever has all of the own places takes none of others.
    with pytest.raises(Overloaded, match="64 launchers of ada are connected"):
        join(workers, "gn6-64")
    bobs = [join(workers, f"gn6-{64 * number + at}", uid=BOB + number) for number in (1, 2, 3) for at in range(64)]
    with pytest.raises(Overloaded, match="256 launchers are connected"):
        join(workers, "gn6-256", uid=BOB)
    # Those that are gone make room: at once for the same user, for others after a while.
    workers.leave(first)
    workers.leave(bobs[0])
    join(workers, "gn6-64000")
    assert workers.serving(["gn6-0", "gn6-64000"])[0].workers == ("gn6-64000",)
    with pytest.raises(Overloaded):
        join(workers, "gn6-256", uid=BOB)
    now.now += FAILED_S
    join(workers, "gn6-256", uid=BOB)
    assert "gn6-64" not in states(workers)


def test_states_follow_the_last_report(workers: Workers, now: Now) -> None:
    launcher = join(workers, "gn6-0")
    for seconds, state in ((SUSPECT_S - 0.1, "healthy"), (0.1, "suspect"), (FAILED_S - SUSPECT_S, "failed")):
        now.now += seconds
        assert states(workers) == {"gn6-0": state}
    workers.report(launcher, 2, [])
    assert states(workers) == {"gn6-0": "healthy"}
    workers.leave(launcher)
    assert states(workers) == {"gn6-0": "suspect"}
    now.now += FAILED_S
    assert states(workers) == {"gn6-0": "failed"}


def test_a_healthy_launcher_is_not_replaced(workers: Workers, now: Now) -> None:
    first = join(workers, "gn6-0", "gn6-1", pid=7)
    with pytest.raises(UsageError, match="worker gn6-0 is served by process 7") as refused:
        join(workers, "gn6-1", "gn6-2", pid=8)
    # The launcher tries again, since its predecessor may have been killed.
    assert refused.value.code == SERVED
    now.now += SUSPECT_S
    second = join(workers, "gn6-1", "gn6-2", pid=8)
    assert workers.serving(["gn6-0", "gn6-1", "gn6-2"]) == [second]
    # What the first one still sends changes nothing.
    workers.report(first, 9, [row("gn6-1")])
    assert workers.of_group("llama", ADA) == []


def test_a_launcher_that_left_is_replaced_at_once(workers: Workers) -> None:
    workers.leave(join(workers, "gn6-0", pid=7))
    second = join(workers, "gn6-0", pid=8)
    assert workers.serving(["gn6-0"]) == [second]


def test_a_worker_of_another_user(workers: Workers, now: Now) -> None:
    launcher = join(workers, "gn6-0", "gn6-1")
    for seconds in (0.0, SUSPECT_S):
        now.now += seconds
        with pytest.raises(PrivilegeError, match="worker gn6-0 belongs to ada"):
            join(workers, "gn6-1", uid=BOB)
    workers.leave(launcher)
    with pytest.raises(PrivilegeError, match="worker gn6-0 belongs to ada"):
        join(workers, "gn6-1", uid=BOB)
    now.now += FAILED_S
    assert workers.serving(["gn6-1"]) == []
    join(workers, "gn6-1", uid=BOB)


def test_a_launcher_that_is_refused_replaces_no_other(workers: Workers, now: Now) -> None:
    workers.report(join(workers, "gn6-0"), 1, [row()])
    now.now += SUSPECT_S
    join(workers, "gn6-1", uid=BOB)
    with pytest.raises(PrivilegeError):
        join(workers, "gn6-0", "gn6-1")
    assert workers.of_group("llama", ADA) == [row()]


def test_rows_count_while_their_launcher_is_heard_from(workers: Workers, now: Now) -> None:
    launcher = join(workers, "gn6-0", "gn6-1")
    workers.report(launcher, 1, [row(), row("gn6-1", "other")])
    assert workers.of_group("llama", ADA) == [row()]
    now.now += FAILED_S
    assert workers.of_group("llama", ADA) == []
    workers.report(launcher, 2, [row()])
    workers.leave(launcher)
    assert workers.of_group("llama", ADA) == []
    # They are shown on, with the state of their launcher.
    assert [(shown["group_name"], shown["state"]) for shown in workers.rows() if "group_name" in shown] == [
        ("llama", "suspect")
    ]


def test_a_launcher_of_another_user_says_nothing_about_a_group(workers: Workers) -> None:
    # Otherwise a user could say that no process of another user's group is left, and its ranks would run twice.
    workers.report(join(workers, "gn6-0", uid=BOB), 1, [row(seen=9)])
    assert workers.of_group("llama", ADA) == []


def test_a_launcher_speaks_for_its_workers_only(workers: Workers) -> None:
    workers.report(join(workers, "gn6-0"), 1, [row("gn6-1"), row("gn7-0"), row(), row(generation=2)])
    assert workers.of_group("llama", ADA) == [row(generation=2)]


def test_a_refusal_stays_until_its_generation_is_taken(workers: Workers) -> None:
    launcher = join(workers, "gn6-0")
    refusal = row(generation=3, seen=0, clear=False, state="refused", reason="its key is not trusted")
    workers.report(launcher, 1, [refusal])
    workers.report(launcher, 2, [])
    assert workers.of_group("llama", ADA) == [refusal]
    workers.report(launcher, 3, [row(seen=2)])
    assert workers.of_group("llama", ADA) == [refusal, row(seen=2)]
    newer = row(generation=4, seen=0, clear=False, state="refused")
    workers.report(launcher, 4, [newer, row(seen=2)])
    assert workers.of_group("llama", ADA) == [newer, row(seen=2)]
    # A late copy of a record that the launcher has taken already is refused, too.
    workers.report(launcher, 5, [newer, row(seen=4)])
    assert workers.of_group("llama", ADA) == [row(seen=4)]


def test_refusals_do_not_pile_up(workers: Workers) -> None:
    launcher = join(workers, "gn6-0")
    for number in range(5):
        rows = [row(group=f"g{number}-{at}", seen=0, state="refused") for at in range(1009)]
        workers.report(launcher, number, rows)
    assert len(list(workers.rows())) <= MAX_ROWS


def test_rows_of_cluster_workers(workers: Workers, now: Now) -> None:
    launcher = join(workers, "gn6-0", "gn6-1", "gn6-2")
    ended = row(
        "gn6-1", state="ended", rank=1, pid=4711, start_ns=5, signal=9, exit_code=None, since_ns=7, reason="x", log="/l"
    )
    workers.report(launcher, 1, [row(), ended])
    now.now += 1.5
    shown = {each["worker"]: each for each in workers.rows()}
    assert shown["gn6-2"]["rank_state"] == "idle"
    common = {"user": "ada", "uid": ADA, "state": "healthy", "launcher_pid": 7, "version": "0.1.0"}
    assert common.items() <= shown["gn6-1"].items()
    assert shown["gn6-1"]["heard_ns"] == 1_500_000_000
    assert (shown["gn6-1"]["exit_code"], shown["gn6-1"]["pid"], shown["gn6-1"]["log"]) == (-9, 4711, "/l")
    assert (shown["gn6-0"]["exit_code"], shown["gn6-0"]["rank_state"]) == (None, "running")
    nodes = {"ts": 1, "node": "gn6"}
    assert batch_of("cluster.workers", [{**each, **nodes} for each in shown.values()]).num_rows == 3


def test_a_launcher_that_is_long_gone_is_forgotten(workers: Workers, now: Now) -> None:
    workers.leave(join(workers, "gn6-0"))
    now.now += FORGOTTEN_S + 1
    join(workers, "gn6-1")
    assert states(workers) == {"gn6-1": "healthy"}


def test_the_newest_order_waits_for_a_launcher_that_does_not_read() -> None:
    async def run() -> list[object]:
        launcher = Launcher(ADA, "ada", ("gn6-0",))
        for number in range(1009):
            for group in ("a", "b"):
                launcher.put("record", group, f"{group} {number}")
                launcher.put("lease", group, f"lease of {group} {number}")
        return [await launcher.next_order() for _ in range(4)]

    assert asyncio.run(run()) == ["a 1008", "lease of a 1008", "b 1008", "lease of b 1008"]


def test_a_lease_comes_after_the_record_that_it_is_for() -> None:
    async def run() -> list[object]:
        launcher = Launcher(ADA, "ada", ("gn6-0",))
        launcher.put("lease", "a", "lease of generation 1")
        launcher.put("record", "a", "generation 2")
        launcher.put("lease", "a", "lease of generation 2")
        waits = asyncio.create_task(launcher.next_order())
        orders = [await waits, await launcher.next_order()]
        waits = asyncio.create_task(launcher.next_order())
        await asyncio.sleep(0)
        assert not waits.done()
        launcher.put("record", "a", "generation 3")
        return [*orders, await waits]

    assert asyncio.run(run()) == ["generation 2", "lease of generation 2", "generation 3"]


def test_more_groups_than_a_queue_would_hold(workers: Workers) -> None:
    async def run() -> set[object]:
        launcher = join(workers, "gn6-0")
        for number in range(2003):
            launcher.put("record", f"g{number}", number)
        return {await launcher.next_order() for _ in range(2003)}

    assert asyncio.run(run()) == set(range(2003))


@pytest.mark.parametrize(
    "fields",
    [
        {"worker": "../etc-0x"},
        {"worker": "gn6-0\n"},
        {"group": "a\x1b[2J"},
        {"group": ""},
        {"generation": -1},
        {"generation": 1 << 64},
        {"seen": 10**400},
        {"rank": 1 << 31},
        {"pid": -(1 << 31)},
        {"start_ns": 1 << 62},
        {"since_ns": -1},
        {"exit_code": 1 << 40},
        {"signal": 1 << 40},
        {"restarts": 1 << 40},
        {"state": "exploded"},
        {"state": None},
        {"clear": 1},
        {"pid": True},
        {"pid": "7"},
        {"reason": 7},
        {"log": None},
    ],
)
def test_a_row_out_of_bounds_is_refused(fields: Mapping[str, Any]) -> None:
    with pytest.raises(FormatError) as refused:
        rows_from(json.dumps([asdict(row()), {**asdict(row()), **fields}]).encode())
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"null",
        b"[null]",
        b"[",
        b"\xff",
        b"[" * 10_000,
        b"[" + b"9" * 5_000 + b"]",
        b" " * (1 << 20) + b"[]",
        rows_json([row()] * (MAX_ROWS + 1))[: 1 << 20],
        json.dumps([{}] * (MAX_ROWS + 1)).encode(),
    ],
)
def test_a_malformed_report_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as refused:
        rows_from(data)
    assert len(refused.value.message) < 300


def test_a_report_of_too_many_rows_says_how_many() -> None:
    small = json.dumps([{"worker": "g-0", "group": "a", "generation": 0, "seen": 0, "clear": True, "state": "idle"}])
    with pytest.raises(FormatError, match="has 4,097 rows"):
        rows_from(b"[" + b",".join([small[1:-1].encode()] * 4097) + b"]")
    with pytest.raises(FormatError, match=r"has 1,048,577 bytes"):
        rows_from(b" " * ((1 << 20) + 1))


def test_texts_of_a_row_are_made_harmless() -> None:
    hostile = row(reason="\x1b[2J\udc80\n" + "a" * 10_000, log="/home/ada/\udc80.log")
    [taken] = rows_from(rows_json([hostile]))
    assert taken.reason.startswith("\\x1b[2J\\udc80\\n")
    assert (len(taken.reason), taken.log) == (500, "")
    [taken] = rows_from(rows_json([row(log="/" + "a" * 10_000)]))
    assert taken.log == ""
    [taken] = rows_from(rows_json([row(log="/home/ada/\u6a21\u578b.log")]))
    assert taken.log == "/home/ada/\u6a21\u578b.log"


def test_an_empty_report() -> None:
    assert rows_from(b"") == rows_from(b"[]") == []


_TEXT = st.text(max_size=20)
_NUMBERS = st.none() | st.integers(-(1 << 70), 1 << 70)


@given(
    st.lists(
        st.builds(
            WorkerRow,
            worker=st.sampled_from(("gn6-0", "gn6-1", "gn7-0")) | _TEXT,
            group=st.sampled_from(("llama", "other")) | _TEXT,
            generation=st.integers(0, 5) | st.integers(),
            seen=st.integers(0, 5),
            clear=st.booleans(),
            state=st.sampled_from(("idle", "running", "ended", "refused", "exploded")),
            rank=_NUMBERS,
            pid=_NUMBERS,
            start_ns=_NUMBERS,
            exit_code=_NUMBERS,
            signal=_NUMBERS,
            reason=_TEXT,
            log=_TEXT,
        ),
        max_size=8,
    )
)
def test_whatever_a_launcher_reports_can_be_stored_and_passed_on(rows: list[WorkerRow]) -> None:
    workers = Workers("gn6", SUSPECT_S, FAILED_S)
    launcher = join(workers, "gn6-0", "gn6-1")
    try:
        workers.report(launcher, 1, rows_from(rows_json(rows)))
    except ProbingError:
        return
    nodes = {"ts": 1, "node": "gn6"}
    assert batch_of("cluster.workers", [{**each, **nodes} for each in workers.rows()]).num_rows >= 1
    passed_on = workers.of_group("llama", ADA)
    assert rows_from(rows_json(passed_on)) == passed_on
