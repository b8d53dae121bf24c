"""stacks --merge, vars, config and profile against real gRPC servers with known rows."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from client_fake_node import FakeNode, process, sample, stack, thread, variable

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import age

Run = Callable[..., tuple[int, str, str]]
_DIST = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"


def failed(rank: int) -> pb.TargetFailure:
    gone = pb.Error(kind="ProcessGone", message="the process exited", hint="look again")
    return pb.TargetFailure(pid=1000 + rank, rank=rank, job="j1", error=gone)


def test_merged_stacks_of_a_job_over_all_nodes(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, err = ctl("stacks", "--merge", "--job", "j1", "--all-nodes")
    assert (code, err) == (0, "")
    assert out == (
        "job j1  MainThread  ranks 0-3\n"
        "  main (/home/user/train.py:88)\n"
        "  ├─ [2] read_batch (/home/user/train.py:31)\n"
        f"  └─ [0-1,3] all_reduce ({_DIST}:2810)\n"
    )
    (group,) = json.loads(ctl("stacks", "--merge", "--all-nodes", "-f", "json")[1])
    assert {key: value for key, value in group.items() if key != "children"} == {
        "job": "j1",
        "thread": "MainThread",
        "ranks": [0, 1, 2, 3],
        "pids": [],
        "threads": 4,
    }
    (outer,) = group["children"]
    assert outer["children"][0] == {
        "func": "read_batch",
        "file": "/home/user/train.py",
        "lineno": 31,
        "frame_type": "Python",
        "ranks": [2],
        "pids": [],
        "threads": 1,
        "complete": True,
        "children": [],
    }
    rows = list(csv.DictReader(io.StringIO(ctl("stacks", "--merge", "--all-nodes", "-f", "csv")[1])))
    assert [(row["depth"], row["func"], row["ranks"]) for row in rows] == [
        ("0", "main", "[0,1,2,3]"),
        ("1", "read_batch", "[2]"),
        ("1", "all_reduce", "[0,1,3]"),
    ]


def test_the_report_names_a_node_that_does_not_have_the_job(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    pair[1].threads = []
    report = tmp_path / "report.json"
    assert ctl("stacks", "--job", "j1", "--all-nodes", "--report", str(report))[::2] == (0, "")
    answered = {entry["address"]: entry["node"] for entry in json.loads(report.read_text())["answered"]}
    assert answered == {node.address: node.name for node in pair}


def test_merged_stacks_of_other_threads_and_of_ranks_that_cannot_be_read(
    pair: tuple[FakeNode, FakeNode], ctl: Run
) -> None:
    pair[1].failures = [failed(3)]
    del pair[1].threads[1]
    code, out, err = ctl("stacks", "--merge", "--threads", "all", "--all-nodes")
    assert (code, err) == (0, "warning: pid 1003 (rank 3) on beta: the process exited\n")
    assert "job j1  MainThread  ranks 0-2\n" in out
    assert out.endswith("\njob j1  2 threads without a frame: pin_memory (2)\n")


def test_native_frames_and_locals(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    node = pair[0]
    shown = thread(0, 1000, 1000, "MainThread", ("main", "/home/user/train.py", 88), native_missing="it runs")
    inner = pb.Frame(func="c10d::allreduce", file="/usr/lib/libtorch_cpu.so", frame_type="Native")
    shown.frames.insert(0, inner)
    shown.frames[1].locals.append(pb.Variable(name="step", type="int", value="7", number=7))
    shown.frames[1].locals.append(pb.Variable(name="loss", type="Tensor", reason="on cuda:0"))
    node.threads = [shown]
    code, out, _ = ctl("stacks", "1000", "--native", "--locals")
    assert code == 0
    assert out.splitlines()[2:] == [
        "    native frames are missing: it runs",
        "    c10d::allreduce (/usr/lib/libtorch_cpu.so) [native]",
        "    main (/home/user/train.py:88)",
        "        step: int = 7",
        "        loss: Tensor (on cuda:0)",
    ]
    assert (node.stacks_asked[-1].native, node.stacks_asked[-1].locals) == (True, True)
    (found,) = json.loads(ctl("stacks", "--native", "--locals", "-f", "json")[1])
    assert (found["native_missing"], found["frames"][0]["locals"]) == ("it runs", [])
    assert found["frames"][1]["locals"] == [
        {"name": "step", "type": "int", "value": "7", "number": 7.0, "reason": None},
        {"name": "loss", "type": "Tensor", "value": None, "number": None, "reason": "on cuda:0"},
    ]
    assert ctl("stacks", "--native", "--locals", "-f", "parquet", "-o", os.devnull)[0] == 0
    assert ctl("stacks", "--native", "--merge")[2] == "warning: native frames are missing: it runs\n"
    ctl("stacks")
    assert (node.stacks_asked[-1].native, node.stacks_asked[-1].locals) == (False, False)


def test_a_variable_that_is_nowhere_is_an_error(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    def nowhere(rank: int, name: str) -> pb.Value:
        value = variable(rank, name, "", None, reason=f"there is no variable {name!r} in any frame")
        value.func = ""
        return value

    pair[0].values = [nowhere(0, "typo"), nowhere(1, "typo"), nowhere(0, "loss"), variable(1, "loss", "float", "1.5")]
    code, out, err = ctl("vars", "--job", "j1", "typo")
    assert (code, out, err.splitlines()[0]) == (1, "", "error: no such variable was found: typo")
    # A name that some ranks have is none.
    code, out, err = ctl("vars", "--job", "j1", "loss")
    assert (code, len(out.splitlines()), err) == (0, 3, "")
    code, out, err = ctl("vars", "--job", "j1", "loss", "typo")
    assert (code, err) == (0, "warning: no such variable was found: typo\n")
    # One that is there and cannot be read is no typo.
    pair[0].values = [variable(0, "loss", "Tensor", None, reason="on cuda:0")]
    assert ctl("vars", "--job", "j1", "loss")[0] == 0


def test_threads_without_a_frame_are_one_line(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    names = ("pin_memory", "pt_autograd_0", "cuda-EvtHandlr", "cuda-EvtHandlr")
    idle = [thread(0, 1000, 6000 + n, name, gil=False) for n, name in enumerate(names)]
    holds = thread(0, 1000, 7000, "holder", gil=True)
    pair[0].threads = [thread(0, 1000, 1000, "python", ("main", "/home/user/train.py", 88)), *idle, holds]
    out = ctl("stacks", "1000")[1]
    assert out.splitlines()[1:] == [
        "  thread 1000 python [sleeping]",
        "    main (/home/user/train.py:88)",
        "  thread 7000 holder [sleeping, holds the GIL]",
        "    (no Python frame)",
        "  4 threads without a frame: pin_memory, pt_autograd_0, cuda-EvtHandlr (2)",
    ]
    # Other formats have them all.
    assert len(json.loads(ctl("stacks", "1000", "-f", "json")[1])) == 6
    # A main thread without frames is worth its own lines.
    pair[0].threads = [thread(0, 1000, 1000, "python")]
    assert ctl("stacks", "1000")[1].endswith("  thread 1000 python [sleeping]\n    (no Python frame)\n")


@pytest.mark.parametrize("words", [(), ("--merge",)])
def test_native_stacks_begin_with_python_and_have_short_names(
    pair: tuple[FakeNode, FakeNode], ctl: Run, words: tuple[str, ...]
) -> None:
    long = "void c10d::Work<std::vector<at::Tensor, std::allocator<at::Tensor> > >::wait(" + "int, " * 99 + "int)"

    def native(name: str) -> pb.Frame:
        return pb.Frame(func=name, file="/usr/lib/libx.so", frame_type="Native")

    start = [native(name) for name in ("PyEval_EvalCode", "Py_BytesMain", "__libc_start_main", "_start")]
    shown = thread(0, 1000, 1000, "MainThread", ("main", "/home/user/train.py", 88))
    python = list(shown.frames)
    del shown.frames[:]
    shown.frames.extend([native(long), *python, *start])
    alone = thread(0, 1000, 1001, "reader")
    alone.frames.extend([native("poll"), native("_start")])
    pair[0].threads = [shown, alone]
    out = ctl("stacks", "1000", "--native", *words)[1]
    assert not {"PyEval_EvalCode", "Py_BytesMain", "__libc_start_main"} & set(out.split())
    assert f"{long[:59]}… (/usr/lib/libx.so) [native]" in out
    assert max(map(len, out.splitlines())) < 120
    if not words:
        # A thread without Python keeps all.
        assert "    poll (/usr/lib/libx.so) [native]\n    _start (/usr/lib/libx.so) [native]\n" in out
        (first, *_) = json.loads(ctl("stacks", "1000", "--native", "-f", "json")[1])
        assert [frame["func"] for frame in first["frames"]] == [long, "main", *(frame.func for frame in start)]


def test_vars_of_a_job_and_of_a_process(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    loss = variable(0, "loss", "Tensor", None, reason="on cuda:0")
    pair[0].values = [variable(1, "step", "int", "7", number=7), loss]
    pair[1].values = [variable(2, "step", "int", "6", number=6)]
    code, out, _ = ctl("vars", "--job", "j1", "step", "loss", "--all-nodes")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [
            ["RANK", "PID", "FUNC", "NAME", "TYPE", "VALUE"],
            ["0", "1000", "main", "loss", "Tensor", "(on", "cuda:0)"],
            ["1", "1001", "main", "step", "int", "7"],
            ["2", "1002", "main", "step", "int", "6"],
        ],
    )
    # The process is on one node; that the other has none is no error.
    assert json.loads(ctl("vars", "1002", "step", "--all-nodes", "-f", "json")[1]) == [
        {
            "node": "beta",
            "job": "j1",
            "run": "r1",
            "rank": 2,
            "pid": 1002,
            "tid": 1002,
            "func": "main",
            "name": "step",
            "type": "int",
            "value": "6",
            "number": 6.0,
            "reason": None,
        },
    ]
    assert ctl("vars", "1002", "step")[0] == 1
    code, out, err = ctl("vars", "--job", "j1", "nope")
    assert (code, out, err.splitlines()[0]) == (1, "", "error: no such variable was found: nope")
    pair[0].failures = [failed(0)]
    assert ctl("vars", "--job", "j1", "step")[2] == "warning: pid 1000 (rank 0) on alpha: the process exited\n"


def test_watching_is_a_change_of_settings(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    asked = ("vars", "--job", "j1", "step", "loss", "--watch", "--for", "10m", "--interval", "500ms")
    code, out, err = ctl(*asked, "--all-nodes")
    assert code == 0
    assert out.count("step,loss") == 2
    assert err.splitlines()[0] == "stored in python.variables every 500 ms for 10m00s; to see it:"
    query = err.splitlines()[1].partition('"')[2].rstrip('"')
    assert ctl("query", query)[0] == 0
    for node in pair:
        assert [(c.key, c.value, c.job, c.for_ms) for c in node.configured] == [
            ("variables.watch", "step,loss", "j1", 600_000),
            ("variables.interval_s", "0.5", "", 600_000),
        ]
    shown = json.loads(ctl("vars", "1000", "1001", "step", "--watch", "-f", "json")[1])
    assert [(s["key"], s["value"], s["pid"]) for s in shown] == [
        ("variables.watch", "", None),
        ("variables.watch", "step", 1000),
        ("variables.watch", "step", 1001),
    ]
    assert ctl("vars", "--unwatch", "--job", "j1")[0] == 0
    assert ctl("vars", "--unwatch", "1000", "1001")[0] == 0
    assert set(pair[0].changes) == {("variables.interval_s", "", 0)}
    assert ctl("vars", "--unwatch")[0] == 0
    assert pair[0].changes == {}


def test_config_shows_and_sets(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    lines = ctl("config")[1].splitlines()
    assert lines[0].split() == ["KEY", "VALUE", "DEFAULT", "WHERE", "UNTIL", "MEANING"]
    assert lines[1].split()[:5] == ["sampling.hz", "19", "19", "everywhere", "-"]
    code, out, _ = ctl("config", "sampling.hz=99", "--pid", "1000", "--for", "10m", "-f", "json")
    assert (code, json.loads(out)[1:]) == (
        0,
        [
            {
                "node": "alpha",
                "key": "sampling.hz",
                "value": "99",
                "default": "19",
                "job": None,
                "pid": 1000,
                "until": "2033-05-18T03:33:20.000000005Z",
                "persisted": False,
                "doc": "what it means",
                **dict.fromkeys(("deletes_segments", "deletes_rows", "deletes_bytes", "deletes_from")),
            },
        ],
    )
    change = pair[0].configured[-1]
    assert (change.HasField("value"), change.for_ms, change.job, change.persist) == (True, 600_000, "", False)
    pair[1].jobs = set()
    # Of all nodes, those that have the job.
    lines = ctl("config", "sampling.hz=5", "--job", "j1", "--all-nodes", "--persist")[1].splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["sampling.hz", "19", "19", "everywhere"],
        ["sampling.hz", "5", "19", "job"],
    ]
    assert "kept" in lines[2]
    lines = ctl("config", "sampling.hz", "--all-nodes")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "alpha", "alpha", "alpha", "beta"]
    assert ctl("config", "sampling.hz", "--reset", "--job", "j1")[0] == 0
    assert list(pair[0].changes) == [("sampling.hz", "", 1000)]
    assert "restart" in ctl("config", "sampling.hz=19", "--job", "j1")[1]
    # An empty value is a value.
    ctl("config", "variables.watch=")
    assert (pair[0].configured[-1].HasField("value"), pair[0].configured[-1].value) == (True, "")


def test_functions_by_time(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("profile", "--all-nodes", "--job", "j1")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "job j1 since 5m ago: 4 s on the CPU in 400 samples")
    assert [line.split()[-2] for line in lines[2:]] == ["all_reduce", "read_batch", "main", "step"]
    rows = json.loads(ctl("profile", "--all-nodes", "--rank", "2", "-f", "json")[1])
    assert rows[0] == {
        "func": "read_batch",
        "file": "/home/user/train.py",
        "lineno": None,
        "self_ns": 900_000_000,
        "total_ns": 900_000_000,
        "self_share": 0.9,
        "total_share": 0.9,
    }
    rows = json.loads(ctl("profile", "1000", "--lines", "-f", "json")[1])
    assert [(r["func"], r["lineno"]) for r in rows] == [
        ("all_reduce", 2810),
        ("read_batch", 31),
        ("all_reduce", 2811),
        ("main", 88),
        ("step", 60),
        ("main", 87),
    ]


@pytest.mark.parametrize(("state", "ns"), [(("--cpu",), 4), (("--wall",), 24), (("--off-cpu",), 20)])
def test_every_format_holds_the_same_time(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, state: tuple[str, ...], ns: int
) -> None:
    asked = ("profile", "--all-nodes", *state)
    files = {kind: tmp_path / kind for kind in ("folded", "speedscope", "svg", "pprof")}
    for kind, file in files.items():
        assert ctl(*asked, "-F", kind, "-o", str(file)) == (0, "", "")
    lines = files["folded"].read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == ns * 10**9
    (one,) = json.loads(files["speedscope"].read_text())["profiles"]
    assert sum(one["weights"]) == ns * 10**9
    titles = [e.text for e in ET.parse(files["svg"]).iter() if e.tag.endswith("}title")]
    assert titles[1] == f"all processes\n{age(ns * 10**9)}, 100.00%"
    assert b"probingctl" in gzip.decompress(files["pprof"].read_bytes())
    rows = json.loads(ctl(*asked, "-f", "json")[1])
    assert sum(row["self_ns"] for row in rows) == ns * 10**9


def test_apart_by_rank(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    lines = ctl("profile", "--all-nodes", "-F", "folded", "--by", "rank,thread", "--wall")[1].splitlines()
    assert lines[0] == "rank 0;thread MainThread;main (user/train.py);read_batch (user/train.py) 250000000"
    assert len(lines) == 12
    document = json.loads(ctl("profile", "--all-nodes", "-F", "speedscope", "--by", "rank")[1])
    assert [p["name"] for p in document["profiles"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_table_apart_by_rank_has_a_column_for_it(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    lines = ctl("profile", "--all-nodes", "--by", "rank")[1].splitlines()
    assert lines[1].split()[:3] == ["RANK", "SELF", "SELF"]
    assert lines[2].split() == ["2", "900", "ms", "90.0", "900", "ms", "90.0", "read_batch", "user/train.py"]
    rows = json.loads(ctl("profile", "--all-nodes", "--by", "rank,thread", "-f", "json")[1])
    assert {(row["rank"], row["thread"]) for row in rows} == {(rank, "MainThread") for rank in range(4)}
    # Shares are of the rank's own time.
    assert {sum(r["self_share"] for r in rows if r["rank"] == rank) for rank in range(4)} == {1.0}
    changes = json.loads(ctl("profile", "--all-nodes", "--by", "rank", "--diff", "before:1s", "-f", "json")[1])
    assert changes[0]["rank"] in range(4)


def test_only_while_the_gil_was_held(tmp_path: Path, ctl: Run) -> None:
    rows = [sample("n", 0, 1, 7), sample("n", 0, 1, 11, gil=False), sample("n", 0, 1, 13, gil=None)]
    stacks = [stack("n", 1, ("f", "/x.py", 1))]
    with FakeNode(tmp_path, "n", {"python.samples": rows, "python.stacks": stacks}) as node:
        for words, ns in (((), 310_000_000), (("--gil",), 70_000_000)):
            found = json.loads(ctl("profile", "-t", node.address, "-f", "json", *words)[1])
            assert [row["self_ns"] for row in found] == [ns]
        assert ctl("profile", "-t", node.address, "--gil")[1].startswith("all processes with the GIL since 5m ago: ")


def test_time_off_the_cpu_is_hinted_at_or_shown(tmp_path: Path, ctl: Run) -> None:
    waits = sample("n", 0, 1, 3, on_cpu=False, duration_ns=3_000_000_000)
    stacks = [stack("n", 1, ("f", "/x.py", 1))]
    picture = tmp_path / "p.svg"

    def subtitle() -> str:
        texts = [e.text or "" for e in ET.parse(picture).iter() if e.get("class") == "quiet"]
        return texts[0]

    with FakeNode(tmp_path, "n", {"python.samples": [waits], "python.stacks": stacks}) as node:
        asked = ("profile", "-t", node.address)
        # A rank that hangs has no other time.
        code, out, err = ctl(*asked)
        assert (code, out.partition("\n")[0]) == (
            0,
            "all processes since 5m ago: 3 s on and off the CPU of the threads that train, 100% off in 3 samples",
        )
        assert err == "hint: no selected sample is on the CPU: this is the training threads' time on and off the CPU\n"
        code, _, err = ctl(*asked, "--cpu")
        assert (code, err.splitlines()[1]) == (1, "hint: there are samples off the CPU: --wall shows them")
        assert ctl(*asked, "-o", str(picture)) == (0, "", "")
        assert "3 s on and off the CPU of the threads that train, 100% off" in subtitle()
        node.insert("python.samples", [sample("n", 0, 1, 100), {**waits, "tid": 5, "duration_ns": 10**12}])
        said = "hint: 75% of the training threads' time is off the CPU: --wall shows what they wait for\n"
        assert ctl(*asked)[::2] == (0, said)
        assert ctl(*asked, "-F", "folded", "-o", str(tmp_path / "folded"))[::2] == (0, said)
        assert ctl(*asked, "--wall")[2] == ctl(*asked, "-f", "json")[2] == ""
        # The picture shows all of it, without the threads that wait anyway, and says so.
        assert ctl("flamegraph", *asked[1:], "-o", str(picture)) == (0, "", "")
        assert subtitle() == "4 s on and off the CPU of the threads that train, 75% off in 103 samples, since 5m ago"
        assert ctl("flamegraph", *asked[1:], "--cpu", "-o", str(picture)) == (0, "", "")
        assert subtitle().endswith("not shown: 75% of the training threads' time is off the CPU, see --wall")
        node.insert("python.samples", [sample("n", 0, 1, 300)])
        assert ctl("profile", "-t", node.address)[2] == ""
        assert ctl("flamegraph", *asked[1:], "-o", str(picture)) == (0, "", "")
        assert subtitle() == "4 s on the CPU in 400 samples, since 5m ago"


@pytest.mark.parametrize(
    ("diff", "legend"),
    [("rank:0", ["more than rank 0", "as rank 0", "less"]), ("before:1s", ["more than before", "as before", "less"])],
)
def test_the_legend_says_what_is_compared(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, diff: str, legend: list[str]
) -> None:
    picture = tmp_path / "p.svg"
    assert ctl("profile", "--all-nodes", "--rank", "1", "--diff", diff, "--cpu", "-o", str(picture)) == (0, "", "")
    texts = [e.text or "" for e in ET.parse(picture).iter() if e.get("class") == "quiet"]
    assert texts[1:] == legend
    assert ("rank 0: " in texts[0]) == (diff == "rank:0")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("p.svg", b"<?xml"),
        ("p.SVG", b"<?xml"),
        ("p.folded", b"main ("),
        ("p.speedscope.json", b"{"),
        ("p.pb.gz", b"\x1f\x8b"),
        ("p.json", b"["),
        ("p.csv", b"func,file"),
        ("p.txt", b"job j1 since"),
    ],
)
def test_a_file_gets_the_format_of_its_name(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, name: str, begins: bytes
) -> None:
    code, out, _ = ctl("profile", "--job", "j1", "-o", str(tmp_path / name))
    assert (code, out) == (0, "")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_difference_of_two_ranks(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    asked = ("profile", "--all-nodes", "--rank", "2", "--diff", "rank:0")
    lines = ctl(*asked)[1].splitlines()
    assert lines[:2] == ["is:  rank 2: 1 s on the CPU in 100 samples", "was: rank 0: 1 s on the CPU in 100 samples"]
    assert lines[3].split()[:3] == ["-65.0", "75.0", "10.0"]
    row = json.loads(ctl(*asked, "-f", "json")[1])[1]
    assert (row["func"], row["self_base_share"], row["self_share"]) == ("read_batch", 0.25, 0.9)
    assert ctl(*asked, "-F", "folded")[1] == (
        "main (user/train.py);read_batch (user/train.py) 250000000 900000000\n"
        "main (user/train.py);step (user/train.py);all_reduce (torch/distributed/distributed_c10d.py) "
        "750000000 100000000\n"
    )
    document = json.loads(ctl(*asked, "-F", "speedscope")[1])
    assert [(p["name"], p["endValue"]) for p in document["profiles"]] == [("rank 2", 10**9), ("rank 0", 10**9)]
    out = ctl("flamegraph", *asked[1:], "--cpu")[1]
    titles = [e.text or "" for e in ET.fromstring(out.encode()).iter() if e.tag.endswith("}title")]
    assert "read_batch (user/train.py)\n90.00%, rank 0: 25.00%: +65.00 points (900 ms, rank 0: 250 ms)" in titles


def test_difference_of_two_times(tmp_path: Path, ctl: Run) -> None:
    now = time.time_ns()
    rows = {
        "python.samples": [
            sample("n", 0, 1, 50, ts=now - 30 * 10**9),
            sample("n", 0, 2, 20, ts=now - 630 * 10**9),
            sample("n", 0, 1, 20, ts=now - 630 * 10**9),
        ],
        "python.stacks": [stack("n", 1, ("f", "x.py", 1)), stack("n", 2, ("g", "x.py", 2), complete=False)],
    }
    with FakeNode(tmp_path, "n", rows) as node:
        asked = ("profile", "-t", node.address, "--since", "1m", "--diff", "before:10m", "-F", "folded")
        code, out, _ = ctl(*asked)
    assert (code, out) == (0, "(outer frames are missing);g (x.py) 200000000 0\nf (x.py) 200000000 500000000\n")


def test_a_stack_that_is_not_stored_keeps_its_time(tmp_path: Path, ctl: Run) -> None:
    rows = {
        "python.samples": [sample("n", 0, 1, 5), sample("n", 0, 7, 3)],
        "python.stacks": [stack("n", 1)],
    }
    with FakeNode(tmp_path, "n", rows) as node:
        out = ctl("profile", "-t", node.address, "-F", "folded")[1]
    assert out == "(no Python frame) 50000000\n(the stack is not stored) 30000000\n"


def test_more_stacks_than_fit_into_one_query(tmp_path: Path, ctl: Run) -> None:
    high = 1 << 63
    rows = {
        "python.samples": [sample("n", 0, high + i, 1) for i in range(2500)],
        "python.stacks": [stack("n", high + i, (f"f{i}", "x.py", 1)) for i in range(2500)],
    }
    with FakeNode(tmp_path, "n", rows) as node:
        out = ctl("profile", "-t", node.address, "-F", "folded")[1]
        assert len(node.asked) == 5
    assert len(out.splitlines()) == 2500
    assert "not stored" not in out


def test_live_changes_the_rate_for_as_long_as_it_takes(
    pair: tuple[FakeNode, FakeNode], ctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was sampled long ago is not what is sampled now.
    code, _, err = ctl("profile", "--all-nodes", "--rank", "2", "--seconds", "50ms", "--hz", "250", "--wall")
    assert (code, err.splitlines()[0].startswith("error: there are no samples of rank 2 since")) == (1, True)
    assert pair[0].configured == []
    changes = [c for c in pair[1].configured if c.HasField("value") or c.reset]
    assert [(c.key, c.value, c.pid, c.reset) for c in changes] == [
        ("sampling.hz", "250", 1002, False),
        ("sampling.off_cpu", "true", 1002, False),
        ("sampling.hz", "", 1002, True),
        ("sampling.off_cpu", "", 1002, True),
    ]
    assert all(c.for_ms == 5050 for c in changes if not c.reset)
    ctl("profile", "--job", "j1", "--seconds", "10ms")
    assert [(c.key, c.job) for c in pair[0].configured] == [("sampling.hz", "j1")] * 3
    assert pair[0].changes == pair[1].changes == {}
    code, _, err = ctl("profile", "--rank", "77", "--seconds", "10ms")
    assert (code, err.splitlines()[0]) == (1, "error: there is no process of rank 77")


def test_live_leaves_earlier_changes_as_they_were(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    ctl("config", "sampling.hz=50", "--job", "j1", "--persist")
    ctl("config", "sampling.hz=7", "--for", "1h", "--all-nodes")
    before = [dict(node.changes) for node in pair]
    for words in ((), ("--job", "j1"), ("--rank", "0")):
        ctl("profile", "--all-nodes", *words, "--seconds", "10ms")
        assert [node.changes for node in pair] == before


def test_live_shows_what_was_sampled_meanwhile(tmp_path: Path, ctl: Run) -> None:
    rows = {
        "process.processes": [process("n", 0, 1000)],
        "python.samples": [sample("n", 0, 1, 7)],
        "python.stacks": [stack("n", 1, ("f", "x.py", 1))],
    }
    with FakeNode(tmp_path, "n", rows) as node:
        node.meanwhile = lambda: node.insert("python.samples", [sample("n", 0, 1, 5, ts=time.time_ns())])
        code, out, err = ctl("profile", "-t", node.address, "1000", "--seconds", "1s", "-F", "folded")
    assert (code, err) == (0, "")
    # A row for each query before: that for the process, and that for the samples.
    assert out in ("f (x.py) 50000000\n", "f (x.py) 100000000\n")


def test_live_that_is_interrupted_takes_the_rate_back(pair: tuple[FakeNode, FakeNode]) -> None:
    ours, theirs = pty.openpty()
    words = ["profile", "--job", "j1", "--seconds", "10m"]
    program = "import sys; from probing.client.main import main; sys.exit(main())"
    running = subprocess.Popen([sys.executable, "-c", program, *words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while b"sampling at 99 Hz" not in seen:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 65536)
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    assert [(c.job, c.value, c.reset) for c in pair[0].configured] == [
        ("j1", "", False),
        ("j1", "99", False),
        ("j1", "", True),
    ]


def test_an_svg_is_not_for_a_terminal(pair: tuple[FakeNode, FakeNode]) -> None:
    ours, theirs = pty.openpty()
    program = "import sys; from probing.client.main import main; sys.exit(main(['flamegraph']))"
    done = subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: svg is not for a terminal")


def test_a_link_is_written_through(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    assert ctl("profile", "-F", "folded", "-o", str(link))[0] == 0
    assert link.is_symlink()
    assert file.read_text().startswith("main ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("stacks", "--merge", "--locals"), 2, "shows no variables"),
        (("stacks", "--threads", "all"), 2, "needs --merge"),
        (("stacks", "--merge", "--threads", "some"), 2, "neither main nor all"),
        (("vars",), 2, "no name"),
        (("vars", "1000"), 2, "no name"),
        (("vars", "1000", "step", "--interval", "1s"), 2, "need --watch"),
        (("vars", "step", "--watch", "--unwatch"), 2, "contradict"),
        (("vars", "1000", "step", "--watch", "--job", "j1"), 2, "contradict"),
        (("vars", "a,b", "--watch"), 2, "cannot contain a comma"),
        (("vars", "step", "--unwatch"), 2, "takes no names"),
        (("vars", "--job", "nobody", "step"), 1, "there is no job nobody"),
        (("vars", "--job", "nobody", "step", "--watch"), 1, "no job nobody"),
        (("config", "nope"), 2, "no setting nope"),
        (("config", "sampling.hz=often"), 2, "often is no number"),
        (("config", "=5"), 2, "the key is missing"),
        (("config", "sampling.hz=5", "--job", "j1", "--pid", "5"), 2, "contradict"),
        (("config", "sampling.hz", "--for", "5m"), 2, "need a change"),
        (("config", "--persist"), 2, "need a change"),
        (("config", "--reset"), 2, "needs a key"),
        (("config", "sampling.hz=5", "--reset"), 2, "takes no value"),
        (("config", "sampling.hz=5", "--pid", "x"), 2, "x is not a pid"),
        (("config", "sampling.hz=5", "--job", "nobody", "--all-nodes"), 1, "no job nobody"),
        (("profile", "-F", "png"), 2, "unknown output format"),
        (("profile", "-F", "svg", "-f", "json"), 2, "contradict"),
        (("profile", "--job", "nobody"), 1, "no job nobody"),
        (("profile", "--job", "j1", "--rank", "9"), 1, "no samples of job j1, rank 9 since 5m ago"),
        (("profile", "--diff", "rank:9"), 1, "no samples of rank 9"),
        (("profile", "--hz", "0", "--seconds", "1s"), 2, "--hz"),
        (("profile", "--rank", "-1"), 2, "--rank"),
    ],
)
def test_every_error_of_these_is_one_line_and_a_hint(
    pair: tuple[FakeNode, FakeNode], ctl: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    got, out, err = ctl(*arguments)
    lines = err.splitlines()
    assert (got, out, len(lines)) == (code, "", 2), err
    assert says.lower() in lines[0].lower()
    assert lines[1].startswith("hint: ")


def test_hostile_text_cannot_drive_the_terminal(tmp_path: Path, ctl: Run) -> None:
    evil = "\x1b]0;owned\x07\u202e\x9b2J"
    rows = {
        "python.samples": [sample("n", 0, 1, 5, thread=evil, job=evil)],
        "python.stacks": [stack("n", 1, (evil, evil, 1))],
    }
    with FakeNode(tmp_path, "evil", rows) as node:
        node.values = [variable(0, "x", evil, evil)]
        node.threads = [thread(0, 5, 5, evil, (evil, evil, 1), native_missing=evil)]
        node.threads[0].frames[0].locals.append(pb.Variable(name=evil, type=evil, value=evil))
        node.settings = {evil: evil}
        for command in (
            ("stacks", "--native", "--locals"),
            ("stacks", "--merge", "--native"),
            ("vars", "x"),
            ("config",),
            ("profile",),
            ("profile", "-F", "folded", "--by", "thread,job"),
            ("profile", "-F", "speedscope"),
            ("flamegraph", "--by", "thread"),
            ("profile", "--diff", "rank:0"),
        ):
            code, out, err = ctl(*command, "-t", node.address)
            assert code == 0, err
            assert not set(out + err) & {"\x1b", "\x07", "\u202e", "\x9b"}, command
