"""Hangs in dumps of PyTorch's flight recorder, and dumps that are hostile, cut, or of several jobs."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from diagnosis_cases import instructions
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import NotFound, ProbingError
from probing.client.diagnosis.asking import from_dumps
from probing.diagnosis.flight_recorder.dump import Group, RankDump, read_dump
from probing.diagnosis.flight_recorder.hang import _whole, diagnose_dumps
from probing.diagnosis.ladder import Diagnosis

WORLD = tuple(range(4))
GROUPS: dict[str, tuple[int, ...]] = {"0": WORLD, "1": (0, 1), "2": (2, 3)}
IDS = {name: str(number) for number, name in enumerate(GROUPS)}


def described(group: str) -> str:
    return "default_pg" if group == "0" else f"group {group}"


def call(group: str, seq: int, state: str = "scheduled", op: str = "all_reduce", p2p: int = 0) -> dict[str, Any]:
    return {
        "pg_id": int(IDS.get(group, "0")),
        "process_group": (group, described(group)),
        "collective_seq_id": seq,
        "p2p_seq_id": p2p,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[23, 7]],
        "state": state,
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
    }


def dump(*calls: dict[str, Any], groups: dict[str, tuple[int, ...]] = GROUPS, **called: int) -> dict[str, Any]:
    """Returns a dump with ``calls``; ``called``: the last operation of groups, as g0=5."""
    return {
        "version": "2.9",
        "pg_config": {name: {"desc": described(name), "ranks": str(list(ranks))} for name, ranks in groups.items()},
        "pg_status": {IDS[name[1:]]: {"last_enqueued_collective": seq} for name, seq in called.items()},
        "entries": list(calls),
    }


def done(group: str, seq: int) -> dict[str, Any]:
    return call(group, seq, "completed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "traces"
    made.mkdir()
    return made


def write(folder: Path, dumps: dict[int, Any]) -> Diagnosis:
    for rank, value in dumps.items():
        data = value if isinstance(value, bytes) else pickle.dumps(value, protocol=2)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return from_dumps(folder)


def the(diagnosis: Diagnosis) -> tuple[str, list[int], tuple[int, ...]]:
    (finding,) = diagnosis.findings
    return finding.verdict.id, [culprit.rank for culprit in finding.culprits], finding.victims


def test_a_rank_that_has_not_called_is_named(folder: Path) -> None:
    waits = dump(done("0", 6), call("0", 7))
    found = write(folder, {0: waits, 1: waits, 2: dump(done("0", 6)), 3: waits})
    assert the(found) == ("not_joined", [2], (0, 1, 3))
    assert "all that it called has completed" in found.findings[0].sentence
    assert found.findings[0].evidence == ("ranks 0-1,3 wait in all_reduce seq 7 of default_pg for rank 2",)


def test_a_rank_whose_gpu_does_not_get_on_is_named(folder: Path) -> None:
    # Rank 1 has called all, and its GPU has not completed what it has on rank 0.
    stuck = dump(call("1", 5), call("0", 7))
    found = write(folder, {0: dump(done("1", 5), call("0", 7)), 1: stuck, 2: dump(call("0", 7)), 3: dump(call("0", 7))})
    assert the(found) == ("no_completion", [1], (0, 2, 3))
    assert "has completed on other ranks and not on it" in found.findings[0].sentence


def test_a_chain_of_groups_leads_to_its_end(folder: Path) -> None:
    found = write(
        folder,
        {
            0: dump(call("1", 5)),
            1: dump(done("1", 4), call("0", 7)),
            2: dump(call("0", 7)),
            3: dump(done("0", 6), done("2", 9)),
        },
    )
    assert the(found) == ("not_joined", [3], (0, 1, 2))


def test_sends_and_receives_are_matched(folder: Path) -> None:
    # Rank 0 and 1 exchange in one batch; rank 2 receives from rank 3, which has not sent.
    both = [call("0", 3, op="send 0->1", p2p=1), call("0", 3, op="recv 0<-1", p2p=2)]
    back = [call("0", 3, op="recv 1<-0", p2p=1), call("0", 3, op="send 1->0", p2p=2)]
    found = write(folder, {0: dump(*both), 1: dump(*back), 2: dump(call("0", 3, op="recv 2<-3")), 3: dump(g0=3)})
    assert the(found) == ("not_joined", [3], (2,))


def test_a_cycle_is_a_deadlock(folder: Path) -> None:
    found = write(
        folder,
        {
            0: dump(call("0", 3, op="recv 0<-1")),
            1: dump(call("0", 3, op="recv 1<-0")),
            2: dump(done("0", 2)),
            3: dump(done("0", 2)),
        },
    )
    assert the(found) == ("deadlock", [], (0, 1))


def test_what_all_have_joined_names_nobody(folder: Path) -> None:
    assert the(write(folder, dict.fromkeys(WORLD, dump(call("0", 7))))) == ("no_completion", [], WORLD)


def test_a_rank_of_a_thousand(folder: Path) -> None:
    world = {"0": tuple(range(1000))}
    waits, late = (pickle.dumps(dump(*calls, groups=world), protocol=2) for calls in ([call("0", 7)], [done("0", 6)]))
    found = write(folder, {rank: late if rank == 523 else waits for rank in world["0"]})
    assert the(found)[:2] == ("not_joined", [523])
    assert len(found.findings[0].victims) == 999


def test_nothing_in_flight_is_no_finding(folder: Path) -> None:
    assert write(folder, dict.fromkeys(WORLD, dump(done("0", 7)))).findings == ()


def test_the_status_says_what_was_called_where_only_active_operations_are_dumped(folder: Path) -> None:
    waits, last = dump(call("0", 7)), dump(call("2", 6), call("0", 7))
    found = write(folder, {0: waits, 1: waits, 2: last, 3: dump(g0=6, g2=5)})
    assert the(found)[:2] == ("not_joined", [3])
    # All has completed on rank 3, so it is rank 2 whose GPU does not get on.
    found = write(folder, {0: waits, 1: waits, 2: last, 3: dump(g0=7, g2=6)})
    assert the(found) == ("no_completion", [2], (0, 1))


def test_a_rank_without_a_dump_may_be_the_one(folder: Path) -> None:
    waits = dump(call("0", 7))
    found = write(folder, {0: waits, 1: waits, 3: waits})
    assert the(found) == ("not_joined", [2], (0, 1, 3))
    assert [missing.text for missing in found.missing] == ["no dump of rank 2"]
    assert found.findings[0].confidence == 0.5


def test_groups_without_members_as_gloos(folder: Path) -> None:
    waits, elsewhere = dump(done("0", 6), call("0", 7), groups={"": ()}), dump(done("0", 6), groups={"": ()})
    assert the(write(folder, {0: waits, 1: elsewhere, 2: waits})) == ("not_joined", [1], (0, 2))


def test_dumps_of_two_jobs_name_nobody(folder: Path) -> None:
    found = write(folder, {0: dump(call("0", 7)), 1: dump(call("0", 7), groups={"0": (0, 1)})})
    assert the(found) == ("cannot_tell", [], ())
    assert "the dumps are of 2 jobs" in found.missing[0].text


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x02", pickle.dumps(Path("/etc")), b"{", json.dumps({"entries": 7}).encode(), pickle.dumps([1])],
    ids=["empty", "cut", "code", "JSON that is cut", "no records", "no dump"],
)
def test_a_dump_that_cannot_be_read_is_missing(folder: Path, data: bytes) -> None:
    waits = dump(call("0", 7))
    found = write(folder, {0: waits, 1: data, 2: waits, 3: waits})
    assert [missing.rank for missing in found.missing if "cannot be read" in missing.text] == [1]
    assert the(found) == ("cannot_tell", [], (0, 2, 3))
    assert "rank 1 may hold them up: its dump cannot be read" in found.findings[0].sentence


def test_a_rank_that_is_behind_is_named_beside_a_dump_that_cannot_be_read(folder: Path) -> None:
    waits = dump(call("0", 7))
    found = write(folder, {0: waits, 1: b"", 2: dump(done("0", 6)), 3: waits})
    assert the(found) == ("not_joined", [2], (0, 3))


# The keys of PyTorch's FlightRecorder.hpp before version 2.0, and of a version that does not exist yet.
@pytest.mark.parametrize("without", ["process_group", "profiling_name", "collective_seq_id"])
def test_dumps_of_an_unknown_version_show_nothing(folder: Path, without: str) -> None:
    entry = {key: value for key, value in call("0", 7).items() if key != without}
    unknown = {**dump(entry), "version": "9.1\x1b[2J"}
    found = write(folder, dict.fromkeys(WORLD, unknown))
    assert the(found) == ("cannot_tell", [], ())
    assert all("none of its 1 records has a known form (version 9.1\\x1b[2J)" in gap.text for gap in found.missing)
    assert [gap.rank for gap in found.missing] == [*WORLD]


OLD = 26 * 3600 * 10**9


@pytest.mark.parametrize(
    ("left", "says"),
    [
        # The dump of rank 1 was left by a job of the day before.
        ({**call("0", 900), "time_created_ns": call("0", 7)["time_created_ns"] - OLD}, "rank 1 is 26 h older"),
        (
            done("0", 900),
            "all_reduce seq 900 of default_pg has completed on rank 1, and not been called on ranks 0,2-3",
        ),
        (done("1", 6), "all_reduce seq 6 of group 1 has completed on rank 1, and not been called on rank 0"),
    ],
)
def test_dumps_of_two_jobs_of_one_size_name_nobody(folder: Path, left: dict[str, Any], says: str) -> None:
    waits = dump(done("1", 5), call("0", 7))
    found = write(folder, {0: waits, 1: dump(left), 2: waits, 3: waits})
    assert the(found) == ("cannot_tell", [], ())
    assert says in " ".join(gap.text for gap in found.missing)
    assert found.findings[0].missing


def test_groups_that_differ_between_dumps_are_of_two_jobs(folder: Path) -> None:
    waits = dump(call("0", 7))
    found = write(folder, {0: waits, 1: dump(done("0", 6), groups={**GROUPS, "1": (1, 3)}), 2: waits, 3: waits})
    assert the(found) == ("cannot_tell", [], ())
    assert found.missing[0].text == "group 1 of rank 1 has other ranks than in other dumps"


def test_a_root_that_has_gone_on_is_of_the_same_job(folder: Path) -> None:
    root = dump(call("0", 7, "completed", "broadcast"), call("0", 8))
    waits = dump(call("0", 7, op="broadcast"))
    found = write(folder, {0: root, 1: waits, 2: waits, 3: dump(done("0", 6))})
    assert the(found)[:2] == ("not_joined", [3])


WHOLE = pickle.dumps(dump(done("0", 6), call("0", 7)), protocol=2)


@given(st.integers(0, len(WHOLE) - 1), st.sampled_from(WORLD))
def test_a_cut_dump_lets_nobody_else_be_named(size: int, cut: int) -> None:
    behind = 2
    dumps = {rank: dump(done("0", 6)) if rank == behind else dump(done("0", 6), call("0", 7)) for rank in WORLD}
    with TemporaryDirectory() as folder:
        found = write(Path(folder), {**dumps, cut: WHOLE[:size]})
    named = [culprit.rank for finding in found.findings for culprit in finding.culprits]
    assert named == ([] if cut == behind else [behind])
    assert [gap.rank for gap in found.missing] == [cut]


def test_a_dump_in_json(folder: Path) -> None:
    waits = json.dumps(dump(call("0", 7))).encode()
    assert the(write(folder, {0: waits, 1: waits, 2: json.dumps(dump(g0=6)).encode(), 3: waits}))[1] == [2]


def dumps_of(count: int, *, listed: bool, odd: list[dict[str, Any]], even: list[dict[str, Any]]) -> list[RankDump]:
    groups = {"0": tuple(range(count)), "1": tuple(range(count))} if listed else {}
    known: dict[object, Group] = {}
    made = (dump(*(odd if rank % 2 else even), groups=groups) for rank in range(count))
    return [read_dump(rank, pickle.dumps(one, protocol=2), known) for rank, one in enumerate(made)]


STUCK = {"odd": [done("1", 6), call("1", 7)], "even": [done("1", 6), done("1", 7), call("1", 8)]}


@pytest.mark.parametrize("listed", [True, False])
def test_twice_the_dumps_are_twice_the_work(listed: bool) -> None:
    def work(count: int) -> int:
        dumps = dumps_of(count, listed=listed, **STUCK)
        assert [one.verdict.id for one in diagnose_dumps("j", dumps).findings] == ["no_completion"]
        return instructions(lambda: diagnose_dumps("j", dumps))

    assert work(400) < 2.6 * work(200)


def test_the_ranks_of_a_group_without_a_list_are_gathered_once() -> None:
    whole = _whole(dumps_of(50, listed=False, **STUCK), frozenset())
    assert len({id(record.group) for one in whole for record in one.records}) == 1
    assert whole[0].records[0].group.ranks == tuple(range(50))


def test_the_dumps_of_a_job_share_its_groups() -> None:
    one, other = dumps_of(2, listed=True, **STUCK)
    assert one.world is other.world
    assert one.records[0].group is other.records[0].group


def test_a_folder_without_dumps(folder: Path) -> None:
    (folder / "readme").write_text("")
    with pytest.raises(NotFound, match="no dump is in"):
        from_dumps(folder)
    with pytest.raises(NotFound, match="cannot be read"):
        from_dumps(folder / "none")


def test_values_that_contain_themselves() -> None:
    loop: list[Any] = [[1]]
    for _ in range(40):
        loop = [loop, loop, loop, loop]
    loop.append(loop)
    entry = {**call("0", 7), "input_sizes": loop, "pg_id": loop}
    made = {"entries": [entry], "pg_config": {"0": {"ranks": loop, "desc": loop}}, "pg_status": {"0": loop}}
    found = read_dump(0, pickle.dumps(made, protocol=2))
    assert len(found.records) == 1


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.sampled_from(["0", "1", "send 0->1"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["0", "ranks", "entries"]), inner, max_size=3)
    ),
    max_leaves=12,
)
KEYS = (
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "profiling_name",
    "input_sizes",
    "state",
    "retired",
)


@given(
    entries=st.lists(st.dictionaries(st.sampled_from(KEYS), PLAIN), max_size=4),
    config=PLAIN,
    status=PLAIN,
    rank=st.integers(0, 5),
)
def test_any_values_are_read_without_an_error(entries: Any, config: Any, status: Any, rank: int) -> None:
    made = {"entries": [*entries, call("0", 7)], "pg_config": config, "pg_status": status}
    read_dump(rank, json.dumps(made).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with suppress(ProbingError):
        read_dump(0, b"\x80\x02" + data)
