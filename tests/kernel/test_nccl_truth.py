"""What is said of NCCL jobs is true: every operation once, with its arguments, communicator and an interval that holds
its end, against jobs of the doubles, which write down what happened."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.doubles import Call, DoubleJob, Doubles, build, version_code
from doubles.watching import OBJECTS, Watching, expected, until
from long import long_unless

from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.from_dwarf import nccl_layout
from probing.daemon.processes.discovery import backends_of

# Version, variant: struct ncclComm without magic words; the public calls and the table; ncclEnqueueCheck and the table;
# the same with DWARF; a library of which only the dynamic symbols are left.
SETUPS = (
    ("2.18.3", "no_dwarf"),
    ("2.21.5", "no_enqueue_check"),
    ("2.24.3", "dwarf"),
    ("2.27.5", "no_dwarf"),
    ("2.30.7", "dwarf"),
    ("2.32.3", "stripped"),
)
each_setup = pytest.mark.parametrize(
    ("version", "variant"), [long_unless(setup[0] in ("2.18.3", "2.24.3", "2.32.3"), *setup) for setup in SETUPS]
)
SIZE = 3
MS = 1_000_000
# Elements of the calls that fail -> the result that they have.
FAILURES = {7: "ncclInvalidArgument", 11: "ncclSystemError", 17: "ncclInternalError"}
Row = dict[str, Any]


@pytest.fixture
def fallback() -> bool:
    """One road to a uprobe is enough here: test_nccl_operations.py takes both."""
    return False


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., DoubleJob]]:
    jobs: list[DoubleJob] = []

    def start(doubles: Doubles, size: int = SIZE, **environ: str) -> DoubleJob:
        jobs.append(DoubleJob(doubles, tmp_path / f"job{len(jobs)}", size, WATCHDOG_MS="10", **environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def watch(open_session: Callable[..., Session]) -> Iterator[Callable[..., Watching]]:
    """The sources on a new session, or on that of the daemon before."""
    made: list[Watching] = []

    def begin(jobs: Sequence[DoubleJob], **options: object) -> Watching:
        made.append(Watching(open_session(*OBJECTS, **options), jobs))
        return made[-1]

    yield begin
    for watching in made:
        watching.stop()


def built(folder: Path, version: str = "2.27.5", variant: str = "dwarf") -> Doubles:
    (folder / "doubles").mkdir()
    return build(folder / "doubles", version, variant)


def make_work(job: DoubleJob, version: str) -> None:
    """Some of everything, on streams that need a while for it."""
    job.do(f"duration {2 * MS}")
    job.do("do 5 all_reduce 1000 7 4")
    job.do("do 2 broadcast 100 6 0 2")
    job.do("do 1 bcast 101 1 0 1")
    job.do("do 2 reduce 19 4 3 1")
    job.do("do 3 all_gather 17 5")
    job.do("do 3 reduce_scatter 13 9 2")
    job.do("group 4 all_reduce 23 8 1")
    job.do("ring 3 10")
    if version_code(version) >= 22803:
        job.do("do 2 all_to_all 29 7")
        job.do("do 1 gather 31 7 0 1")
        job.do("do 1 scatter 37 7 0 1")
    job.do("style current")
    job.do("do 4 all_reduce 41 10" if version_code(version) >= 22400 else "do 4 all_reduce 41 9")
    job.do("style blocking")
    job.do("do 2 all_reduce 43 7")
    job.do("style plain")
    for what in ("stream", "event", "device"):
        job.do("do 3 all_reduce 47 7")
        job.do(f"sync {what}")
    job.do("graph 2 2 all_reduce 53 7")
    job.do("style side")
    job.do("do 2 all_reduce 59 7")
    job.do("drain")


def pairs_of(watching: Watching, calls: list[Call]) -> list[tuple[Row, Call]]:
    """Each row with its call: both are ordered by time, rank by rank."""
    rows = sorted(watching.wait_for_rows(len(calls)), key=lambda row: (row["pid"], row["ts"]))
    assert len(rows) == len(calls)
    found = list(zip(rows, sorted(calls, key=lambda call: (call.pid, call.before)), strict=True))
    for row, call in found:
        called = watching.mono(row)
        assert called is not None
        assert call.before <= called <= call.inside, (row, call)
    return found


def check_arguments(found: list[tuple[Row, Call]], unknown_comm: bool = False) -> None:
    for row, call in found:
        wanted = expected(call)
        if unknown_comm:
            # Sizes are a multiple of what is not known.
            wanted |= dict.fromkeys(("comm", "comm_rank", "comm_size"))
            wanted |= {name: row[name] for name in ("count", "bytes") if wanted["op"] in ("reduce_scatter", "scatter")}
            wanted |= {name: row[name] for name in ("count", "bytes") if wanted["op"] == "all_to_all"}
        assert {name: row[name] for name in wanted} == wanted, call


def check_ends(watching: Watching, found: list[tuple[Row, Call]]) -> None:
    """Of each operation that ended, the interval holds the end; of one in a graph, nothing is claimed."""
    for row, call in found:
        if call.captured:
            assert (row["state"], row["timing_source"], row["done_hi"]) == (None, "graph", None)
            continue
        ((start, end),) = call.ends
        assert row["state"] == "done", (row, call)
        high = int(row["done_hi"]) - watching.pair.mono_to_utc_ns
        low = None if row["done_within_ns"] is None else high - int(row["done_within_ns"])
        assert (low or 0) <= end <= high, (row, call)
        launched = watching.mono(row, "launch_ns_after")
        assert launched is None or launched <= high, (row, start)


def check_sources(found: list[tuple[Row, Call]]) -> None:
    by_count: dict[int, set[str | None]] = {}
    for row, call in found:
        by_count.setdefault(call.count, set()).add(row["timing_source"])
    assert by_count[1000] == {"watchdog"}
    assert by_count[43] == {"blocking_wait"}
    assert by_count[47] == {"sync"}
    assert by_count[53] == {"graph"}


def check_groups(found: list[tuple[Row, Call]]) -> None:
    """Rows share a group's number just when their calls were in one group."""
    groups: dict[tuple[int, Any], set[int]] = {}
    for row, call in found:
        assert (row["group_id"] is None) is (call.group == 0), (row, call)
        groups.setdefault((call.pid, row["group_id"]), set()).add(call.group)
    assert {len(numbers) for numbers in groups.values()} == {1}
    assert len({key for key in groups if key[1] is not None}) == SIZE * 4


def check_sequence(found: list[tuple[Row, Call]], known: bool) -> None:
    wrong = [(row["seq"], call) for row, call in found if row["seq"] != (call.seq if known else None)]
    assert not wrong, wrong[0]


def knows_comm(version: str, variant: str) -> bool:
    """Whether a communicator made before the probes is recognized: where magic words guard the layout."""
    return version != "2.18.3"


def test_the_operations_of_nccl2_end_where_both_events_say(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    """The next default of PyTorch: its watchdog asks for the start of each operation, and then for its end."""
    doubles = built(tmp_path)
    job = start_job(doubles, NCCL2="1")
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    assert job.do("init world config") == [0] * SIZE
    names = {path.read_text().strip() for rank in job.ranks for path in Path(f"/proc/{rank.pid}/task").glob("*/comm")}
    assert "pt_nccl2_watchd" in names
    assert backends_of(names) == {"nccl"}
    make_work(job, "2.27.5")
    job.finish()
    found = pairs_of(watching, job.calls(0))
    check_arguments(found)
    check_ends(watching, found)
    check_sources(found)
    check_sequence(found, known=True)


@each_setup
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_every_operation_as_it_was(
    version: str,
    variant: str,
    early: bool,
    tmp_path: Path,
    watch: Callable[..., Watching],
    start_job: Callable[..., DoubleJob],
) -> None:
    doubles = built(tmp_path, version, variant)
    job = start_job(doubles)
    watching = watch([job])
    since = 0
    if not early:
        assert job.do("init world config") == [0] * SIZE
        job.do("do 7 all_reduce 5 7")
        job.finish()
        since = watching.attach(doubles.nccl, doubles.cudart)
    else:
        watching.attach(doubles.nccl, doubles.cudart)
        assert job.do("init world config") == [0] * SIZE
    make_work(job, version)
    job.finish()
    found = pairs_of(watching, job.calls(since))
    check_arguments(found, unknown_comm=not early and not knows_comm(version, variant))
    check_ends(watching, found)
    check_sources(found)
    check_groups(found)
    # Before 2.26 NCCL has no count that we could begin with.
    check_sequence(found, early or version_code(version) >= 22600)


class Parsers:
    """The parser's half, without its process."""

    def call(self, op: str, *, fds: Sequence[int], timeout: float, known: Sequence[str]) -> dict[str, Any]:
        assert op == "nccl_layout"
        return {**nccl_layout(fds[0]), "known": False, "why": ""}


def test_build_that_nobody_knows_is_read_by_its_dwarf(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    """Late, and with offsets that no released version has: nothing is known of communicators until DWARF is read."""
    (tmp_path / "doubles").mkdir()
    doubles = build(tmp_path / "doubles", "2.27.5", shift=0x140)
    job = start_job(doubles)
    watching = watch([job])
    job.do("init world config")
    job.do("do 7 all_reduce 5 7")
    job.finish()
    since = watching.attach(doubles.nccl, doubles.cudart)
    job.do("do 2 all_reduce 11 7")
    job.finish()
    blind = pairs_of(watching, job.calls(since))
    check_arguments(blind, unknown_comm=True)
    check_ends(watching, blind)
    finder = LayoutFinder(Parsers(), watching.session.maps["nccl_layouts"])
    finder.start()
    with doubles.nccl.open("rb") as library:
        finder.attach(library.fileno())
        until(lambda: finder.added or finder.reasons)
    finder.stop()
    assert finder.reasons == {}
    make_work(job, doubles.version)
    job.finish()
    found = [pair for pair in pairs_of(watching, job.calls(since)) if pair[1].count != 11]
    check_arguments(found)
    check_ends(watching, found)
    check_sequence(found, known=True)


@each_setup
def test_communicators_are_named_alike_by_all(
    version: str,
    variant: str,
    tmp_path: Path,
    watch: Callable[..., Watching],
    start_job: Callable[..., DoubleJob],
) -> None:
    doubles = built(tmp_path, version, variant)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("init other plain")
    job.do("init later nonblocking")
    job.do("do 2 all_reduce 5 7")
    job.do("use world")
    for rank in range(SIZE):
        job.tell(f"split half {rank % 2} {-rank}", [rank])
    assert job.hear() == [0] * SIZE
    job.do("do 1 all_reduce 5 7")
    job.finish()
    found = pairs_of(watching, job.calls())
    check_ends(watching, found)
    # The hash of a child is in the struct alone; without it we name the child ourselves, alike on all its ranks.
    derived = version == "2.18.3"
    check_children(found, derived)
    check_arguments([pair for pair in found if not derived or pair[1].comm in commons(job)])
    newest = {(row["pid"], row["comm"]): row for row in watching.communicators}
    for made in job.made():
        row = newest.get((made["pid"], made["comm"]))
        if row is None:
            assert derived
            assert made["made_by"] == "split"
            continue
        assert (row["rank"], row["size"], row["made_by"]) == (made["rank"], made["size"], made["made_by"]), (row, made)
        assert row["name"] == (made["name"] or None)


def commons(job: DoubleJob) -> set[str]:
    return {made["comm"] for made in job.made() if made["made_by"] != "split"}


def check_children(found: list[tuple[Row, Call]], derived: bool) -> None:
    names: dict[str, set[Any]] = {}
    for row, call in found:
        names.setdefault(call.comm, set()).add(row["comm"])
    assert {len(seen) for seen in names.values()} == {1}
    assert len({next(iter(seen)) for seen in names.values()}) == len(names)
    if not derived:
        assert all(seen == {comm} for comm, seen in names.items())


def test_errors_belong_to_the_operation_that_had_them(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("do 3 all_reduce 5 7")
    assert job.do("do 1 broadcast 7 7 0 9") == [4] * SIZE
    job.do("fail 2")
    assert job.do("do 1 all_reduce 11 7") == [2] * SIZE
    job.do("do 3 all_reduce 13 7")
    job.do("fail 3 1")
    assert job.do("group 100 all_reduce 17 7") == [3] * SIZE
    job.do("do 3 all_reduce 19 7")
    job.do("drain")
    errors = {count: ("failed", name) for count, name in FAILURES.items()}
    for row, call in pairs_of(watching, job.calls()):
        assert (row["state"], row["error"]) == errors.get(call.count, ("done", None)), (row, call)


def test_asynchronous_errors_are_reported_once(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    for _ in range(3):
        job.do("poll")
    job.do("async 6", [1])
    for _ in range(3):
        job.do("poll")
    watching.drain()
    errors = [(row["rank"], row["async_error"]) for row in watching.communicators if row["async_error"]]
    assert errors == [(1, "ncclRemoteError")]


def test_an_error_of_the_device_fails_what_was_open(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("do 2 all_reduce 5 7")
    job.do("drain")
    job.do("do 3 all_reduce 7 7", [0, 1])
    until(lambda: len(watching.inflight()) == 6)
    job.do("cuda 700", [0])
    job.do("drain", [0])
    until(lambda: len(watching.inflight()) == 3)
    failed = {(row["pid"], row["state"], row["error"]) for row in watching.rows if row["count"] == 7}
    assert failed == {(job.ranks[0].pid, "failed", "cudaError 700")}


def test_a_rank_that_does_not_come_holds_the_others(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("do 2 all_reduce 5 7")
    job.do("drain")
    job.do("do 3 all_reduce 7 7", [0, 1])
    late = {job.ranks[0].pid, job.ranks[1].pid}
    until(lambda: len(watching.inflight()) == 6)
    assert {(row["pid"], row["count"]) for row in watching.inflight()} == {(pid, 7) for pid in late}
    assert {row["state"] for row in watching.inflight()} == {"launched"}
    job.do("abort world", [0])
    until(lambda: len(watching.inflight()) == 3)
    watching.drain()
    aborted = [row for row in watching.rows if row["count"] == 7]
    assert {(row["pid"], row["state"]) for row in aborted} == {(job.ranks[0].pid, "failed")}
    assert len(aborted) == 3


def test_the_last_group_of_very_many_operations_ends(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("group 700 all_reduce 23 7")
    job.do("drain")
    rows = watching.wait_for_rows(700 * SIZE)
    assert watching.inflight() == []
    assert {(row["state"], row["launch_ns_after"] is None) for row in rows} == {("done", False)}


def test_open_operations_outlive_the_daemon(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    """A session that is closed with its pins and opened again, while operations are open: each comes once."""
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    watching.attach(doubles.nccl, doubles.cudart)
    job.do("init world config")
    job.do("do 5 all_reduce 5 7")
    job.do("do 40 all_reduce 7 7", [0, 1])
    until(lambda: len(watching.inflight()) == 80)
    watching.stop()
    watching.session.close(keep=True)
    job.do("do 3 all_gather 11 7", [0, 1])
    again = watch([job])
    again.rows, again.pair = watching.rows, watching.pair
    again.attach(doubles.nccl, doubles.cudart)
    job.do("do 40 all_reduce 7 7", [2])
    job.do("do 3 all_gather 11 7", [2])
    job.finish()
    found = pairs_of(again, job.calls())
    check_arguments(found)
    check_ends(again, found)
    check_sequence(found, known=True)
    assert again.inflight() == []


def test_one_library_behind_two_mounts_counts_once(
    tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    doubles = built(tmp_path)
    job = start_job(doubles)
    watching = watch([job])
    mounts: list[Path] = []
    try:
        for number in range(2):
            folder = tmp_path / f"overlay{number}"
            for name in ("upper", "work", "merged"):
                (folder / name).mkdir(parents=True)
            options = f"lowerdir={doubles.folder},upperdir={folder / 'upper'},workdir={folder / 'work'}"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder / "merged"], check=True)
            mounts.append(folder / "merged")
        for mount in mounts:
            watching.attach(mount / doubles.nccl.name, mount / doubles.cudart.name)
        job.do("init world config")
        make_work(job, doubles.version)
        job.finish()
        found = pairs_of(watching, job.calls())
        check_arguments(found)
        check_ends(watching, found)
        check_sequence(found, known=True)
        made = [(row["pid"], row["comm"]) for row in watching.communicators if row["made_by"]]
        assert sorted(set(made)) == sorted((made["pid"], made["comm"]) for made in job.made())
    finally:
        # A probe holds the file, and so the mount.
        for link in list(watching.session.links.values()):
            watching.session.detach(link)
        for mount in mounts:
            subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.mark.parametrize("ring_bytes", [1 << 24, 1 << 16], ids=["room", "full"])
def test_rows_and_losses_are_the_calls(
    ring_bytes: int, tmp_path: Path, watch: Callable[..., Watching], start_job: Callable[..., DoubleJob]
) -> None:
    """From several processes at once, as fast as they can; a ring that is too small loses, and counts what it loses."""
    doubles = built(tmp_path)
    jobs = [start_job(doubles, 1) for _ in range(4)]
    watching = watch(jobs, sizes={"collectives": ring_bytes})
    watching.attach(doubles.nccl, doubles.cudart)
    calls = 10_000
    for job in jobs:
        job.do("init world config")
        job.tell(f"burst {calls} 0")
    for job in jobs:
        watching.drain(keep=False)
        job.hear()
    watching.drain(keep=False)
    lost = watching.session.counters()["collectives"]["lost"]
    assert watching.count + lost == calls * len(jobs)
    assert (lost > 0) is (ring_bytes == 1 << 16)
