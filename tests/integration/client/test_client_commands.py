"""Every command against real gRPC servers with known rows."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import grp
import http.server
import io
import json
import os
import pty
import pwd
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from client_fake_node import FakeNode, process, thread
from long import long_unless

from probing.api.errors import PeerError, QueryMemory, QueryRejected, Unauthenticated
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables import TABLES
from probing.client.cluster import Cluster
from probing.client.render import output

Run = Callable[..., tuple[int, str, str]]
# An Arrow message whose metadata of 16 bytes make no sense.
_BROKEN = b"\xff\xff\xff\xff\x10\0\0\0" + b"\x7f" * 64


def test_ps_shows_the_target_or_all_nodes(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, err = ctl("-f", "json", "ps")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [(r["role"], r["rank"], r["pid"]) for r in rows] == [
        ("trainer", 0, 1000),
        ("trainer", 1, 1001),
        ("launcher", None, 900),
    ]
    assert {"job", "run", "local_rank", "world_size", "state", "python", "backends"} <= set(rows[0])
    for command in (
        ("ps", "--all-nodes"),
        ("cluster", "list"),
        ("list", "--nodes", f"{pair[0].address},{pair[1].address}"),
    ):
        rows = json.loads(ctl(*command, "-f", "json")[1])
        assert [r["rank"] for r in rows] == [0, 1, 2, 3, None]


def test_ps_fits_a_screen_of_80_columns(tmp_path: Path) -> None:
    rows = [process("node-with-a-long-name.cluster.example", r, 1000 + r, command="python " + "x" * 90) for r in (0, 1)]
    commands = {"ps": 80, "ps --wide": 400, "ps -w": 400, "top --once": 80}
    with FakeNode(tmp_path, "n", {"process.processes": [{**row, "job": "j" * 60} for row in rows]}) as node:
        outputs = _on_a_terminal([f"{words} -t {node.address}" for words in commands], 80)
    for (words, most), lines in zip(commands.items(), outputs, strict=True):
        longest = max(map(len, lines))
        assert (longest <= 80) if most == 80 else (longest > 140), (words, lines)
        assert sum("1000" in line for line in lines) == 1


def _on_a_terminal(commands: list[str], columns: int, environment: dict[str, str] | None = None) -> list[list[str]]:
    """The lines that each command prints to a terminal, without what makes them bold."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = """
import sys
from probing.client.main import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
    print("END", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, *commands], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            seen += data
    os.close(ours)
    assert child.wait(60) == 0
    *outputs, rest = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode()).split("END\r\n")
    assert rest == ""
    return [output.splitlines() for output in outputs]


def test_ps_for_people_is_aligned(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    lines = ctl("ps")[1].splitlines()
    assert lines[0].split() == [
        "NODE",
        "JOB",
        "RUN",
        "ROLE",
        "RANK",
        "LOCAL",
        "WORLD",
        "FROM",
        "PID",
        "STATE",
        "PYTHON",
        "BACKENDS",
        "COMMAND",
    ]
    column = lines[0].index("STATE")
    assert [line[column : column + 7] for line in lines[1:]] == ["running"] * 3


def test_query_over_all_nodes_and_one_of_them_stopped(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path
) -> None:
    sql = "SELECT node, count(*) AS n FROM comm.ops GROUP BY node ORDER BY node"
    asked = ("query", sql, "--nodes", f"{pair[0].address},{pair[1].address}", "-f", "json")
    assert json.loads(ctl(*asked)[1]) == [{"node": "alpha", "n": 100}, {"node": "beta", "n": 100}]
    pair[1].stop()
    report = tmp_path / "report.json"
    code, out, err = ctl(*asked, "--report", str(report))
    assert code == 0
    assert json.loads(out) == [{"node": "alpha", "n": 100}]
    assert err == f"warning: node {pair[1].address} is missing: there is no such socket\n"
    assert json.loads(report.read_text()) == {
        "asked": [pair[0].address, pair[1].address],
        "answered": [{"address": pair[0].address, "node": "alpha"}],
        "failed": [
            {"address": pair[1].address, "node": None, "kind": "PeerError", "reason": "there is no such socket"}
        ],
    }
    report.unlink()
    code, out, err = ctl(*asked, "--strict", "--report", str(report))
    assert (code, out) == (4, "")
    assert err.splitlines()[0].startswith("error: 1 of 2 nodes did not answer: ")
    assert err.splitlines()[1].startswith("hint: ")
    assert len(json.loads(report.read_text())["failed"]) == 1


def test_a_silent_node_is_not_waited_for_by_each_question(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    pair[1].hold = threading.Event()
    both = f"{pair[0].address},{pair[1].address}"
    code, out, err = ctl("nccl", "--nodes", both, "--timeout", "2s", "-f", "json")
    assert (code, err.count("\n"), "is missing" in err) == (0, 1, True)
    assert json.loads(out)[0]["ops"][0]["calls"] == 100
    # One request has all questions.
    assert len(pair[1].requests) == 1
    with Cluster(nodes=[pair[0].address, pair[1].address], timeout=2.2) as cluster:
        for _ in range(3):
            assert cluster.query("SELECT count(*) AS n FROM comm.ops").to_pylist() == [{"n": 100}]
    pair[1].hold.set()
    # The first of them, and no further one.
    assert len(pair[1].requests) == 2 < len(pair[0].requests)


def test_query_with_a_function_over_both_nodes(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    sql = "SELECT count(*) AS n, sum(bytes) AS b, count(DISTINCT seq) AS s, avg(duration_ns) AS d FROM comm.ops"
    assert json.loads(ctl("cluster", "query", sql, "-f", "json")[1]) == [
        {"n": 200, "b": 200_000_000, "s": 50, "d": 2_000_000.0}
    ]


def test_formats_and_files(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    sql = "SELECT rank, op, ts, bytes FROM comm.ops ORDER BY seq, rank LIMIT 2"
    lines = ctl("query", sql, "-f", "jsonl")[1].splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [0, 1]
    rows = list(csv.DictReader(io.StringIO(ctl("query", sql, "-f", "csv")[1])))
    assert [row["op"] for row in rows] == ["all_reduce"] * 2
    parquet, arrow = tmp_path / "x.parquet", tmp_path / "x.arrow"
    assert ctl("query", sql, "-f", "parquet", "-o", str(parquet)) == (0, "", "")
    assert ctl("query", sql, "-f", "arrow", "-o", str(arrow)) == (0, "", "")
    assert pq.read_table(parquet).num_rows == 2
    with arrow.open("rb") as file:
        assert pa.ipc.open_stream(file).read_all().schema.field("ts").type == pa.timestamp("ns")
    assert sorted(path.name for path in tmp_path.glob(".x*")) == []


def test_explain_asks_no_query(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("query", "--explain", "--all-nodes", "SELECT avg(bytes) FROM comm.ops", "-f", "json")
    steps = json.loads(out)
    assert (code, [s["step"] for s in steps]) == (0, ["aggregate", "merge"])
    assert "sum(" in steps[0]["sql"]
    assert pair[0].asked == pair[1].asked == []


def test_explain_names_a_node_whose_engine_has_another_version(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    words = ("query", "--explain", "--all-nodes", "SELECT approx_quantile(bytes, 0.5) FROM comm.ops", "-f", "json")
    steps = json.loads(ctl(*words)[1])
    assert [s["step"] for s in steps] == ["aggregate", "merge"]
    assert "export_state('" in steps[0]["sql"]
    pair[1].engine = "1.5.5"
    steps = json.loads(ctl(*words)[1])
    assert [s["step"] for s in steps] == ["ship", "merge"]
    assert steps[1]["why"].startswith(f"rows are shipped: {pair[1].name} has DuckDB 1.5.5, whose states ")
    assert "export_state" not in steps[0]["sql"]


def test_nccl_names_the_rank_that_is_not_there(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("nccl", "--all-nodes", "-f", "json")
    (comm,) = json.loads(out)
    assert code == 0
    assert (comm["job"], comm["comm"], comm["size"], comm["members"]) == ("j1", "default_pg", 4, [0, 1, 2, 3])
    (op,) = comm["ops"]
    assert (op["op"], op["calls"], op["bytes"], op["p99_ns"], op["busbw_min_gbps"]) == (
        "all_reduce",
        200,
        200_000_000,
        2_000_000.0,
        0.75,
    )
    assert {r["rank"]: r["lag_ns"] for r in comm["ranks"]} == {0: -1000, 1: 0, 2: 39_999_000, 3: 2000}
    assert [(i["rank"], i["seq"]) for i in comm["inflight"]] == [(0, 50), (1, 50), (3, 50)]
    text = ctl("nccl", "--all-nodes", "--job", "j1")[1]
    assert "IN FLIGHT all_reduce seq 50 for 35.0 s: ranks 0-1,3; not in it: 2" in text
    assert "40.0 ms" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    past = ("--since", "2h", "--until", "1h")
    shown = ctl("nccl", "--job", "j1", "--comm", "default_pg", *past)[1]
    assert shown.splitlines()[-1] == "  no collective from 2h00m ago until 1h00m ago"
    assert "IN FLIGHT" not in shown
    assert ctl("nccl", "--job", "j1", *past)[1] == "(no collective from 2h00m ago until 1h00m ago)\n"
    code, _, err = ctl("nccl", "--job", "j1", "--comm", "other")
    assert (code, err.splitlines()[0]) == (1, "error: there is no communicator other of job j1")


def test_stacks_are_by_rank_and_innermost_first(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    threads = json.loads(ctl("stacks", "--job", "j1", "--all-nodes", "-f", "json")[1])
    assert list(threads[0]) == [
        "node",
        "job",
        "run",
        "rank",
        "pid",
        "tid",
        "thread",
        "trains",
        "state",
        "gil",
        "complete",
        "frames",
    ]
    assert [(t["rank"], t["thread"]) for t in threads if t["thread"] == "MainThread"] == [
        (r, "MainThread") for r in range(4)
    ]
    culprit = next(t for t in threads if t["rank"] == 2 and t["frames"])
    assert culprit["frames"][0] == {
        "func": "read_batch",
        "file": "/home/user/train.py",
        "lineno": 31,
        "frame_type": "Python",
    }
    assert "    read_batch (/home/user/train.py:31)\n" in ctl("bt", "1002", "--all-nodes")[1]
    flat = list(csv.DictReader(io.StringIO(ctl("backtrace", "1000", "-f", "csv")[1])))
    assert [(row["depth"], row["func"]) for row in flat] == [("0", "all_reduce"), ("1", "main")]


def test_stacks_of_nobody(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, err = ctl("stacks", "4242", "--all-nodes")
    assert (code, out) == (1, "")
    assert err == "error: no such process\nhint: `probingctl ps` lists them\n"


def test_a_process_that_could_not_be_read_is_named(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    gone = pb.Error(kind="ProcessGone", message="the process exited", hint="look again")
    pair[0].failures = [pb.TargetFailure(pid=7, rank=5, job="j1", error=gone)]
    code, out, err = ctl("stacks", "-f", "json")
    assert (code, err) == (0, "warning: pid 7 (rank 5) on alpha: the process exited\n")
    assert json.loads(out)
    pair[0].threads = []
    code, _, err = ctl("stacks")
    assert (code, err) == (1, "error: pid 7 (rank 5) on alpha: the process exited\nhint: look again\n")


def test_top_prints_one_frame(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    code, out, _ = ctl("top", "--once", "--all-nodes", "--window", "60s")
    assert code == 0
    assert "WAITING 35.0 s in all_reduce seq 50 of default_pg: ranks 0-1,3" in out
    assert "in no collective: rank 2" in out
    assert "read_batch (train.py:31)" in out
    rows = json.loads(ctl("top", "--once", "--all-nodes", "-f", "json")[1])
    assert [(r["rank"], r["op"]) for r in rows] == [(0, "all_reduce"), (1, "all_reduce"), (2, None), (3, "all_reduce")]
    code, _, err = ctl("top", "-f", "json")
    assert (code, err.splitlines()[0]) == (1 + 1, "error: top writes files and other formats only with --once")


def test_tables_status_nodes_pause_version(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    tables = json.loads(ctl("tables", "-f", "json", "--all-nodes")[1])
    assert {"comm.ops", "process.processes"} <= {row["table"] for row in tables}
    columns = json.loads(ctl("tables", "comm.inflight", "-f", "json")[1])
    assert "age_ns" in {row["column"] for row in columns}
    # In the order of their definition: a sentence refers to the one before.
    assert [row["column"] for row in columns] == [column.name for column in TABLES["comm.inflight"].columns]
    assert ctl("tables", "no.such")[0] == 1
    status = json.loads(ctl("status", "--all-nodes", "-f", "json")[1])
    assert [(s["node"], s["uptime_ns"]) for s in status] == [("alpha", 390_000_000_000), ("beta", 390_000_000_000)]
    assert "no /proc/pressure" in ctl("status")[1]
    assert json.loads(ctl("status", "-f", "json")[1])["state"] == "running"
    assert ctl("nodes", "-f", "json")[1].strip() == "[]" == ctl("cluster", "nodes", "-f", "json")[1].strip()
    assert ctl("pause", "--all-nodes")[0] == 0
    assert (pair[0].paused, pair[1].paused) == (True, True)
    assert json.loads(ctl("pause", "--resume", "-f", "json")[1]) == [{"address": pair[0].address, "paused": False}]
    assert ctl("version")[1].startswith("probingctl ")
    asked = json.loads(ctl("version", "-f", "json")[1])
    assert f"{asked['program']} {asked['version']}\n" == ctl("version")[1]
    assert json.loads(ctl("-f", "jsonl", "version")[1]) == asked


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("pss",), 2, "no such command 'pss'. did you mean 'ps'?"),
        (("nonsense",), 2, "nonsense"),
        (("ps", "--nonsense"), 2, "--nonsense"),
        (("query", "SELECT $rank"), 2, "no value for $rank"),
        (("query", "SELECT $rank", "--param", "rank"), 2, "not name=value"),
        (("query", ""), 2, "there is no SQL"),
        (("stacks", "abc"), 2, "abc is not a pid"),
        (("ps", "-f", "xml"), 2, "unknown format xml"),
        (("ps", "--timeout", "soon"), 2, "soon is not a length of time"),
        (("ps", "-t", "nowhere"), 2, "not an address"),
        (("ps", "-t", "unix:/nonexistent/socket"), 1, "there is no such socket"),
        (("ps", "-t", "127.0.0.1:1"), 1, "connection refused"),
        (("ps", "--nodes", "/nonexistent/nodes"), 2, "No such file"),
        (("ps", "--token-file", "/nonexistent/token"), 2, "cannot read the token"),
        (("query", "SELECT * FROM nope.nope", "--all-nodes"), 1, "there is no table nope.nope"),
        (("query", "SELECT nope FROM comm.ops"), 1, "nope"),
        (("ps", "-o", "/nonexistent/file"), 1, "cannot write"),
        (("nccl", "--job", "it's nobody"), 1, "there is no job it's nobody"),
        (("top", "--once", "--job", "nobody"), 1, "there is no job nobody"),
        (("stacks", "--job", "nobody"), 1, "there is no job nobody"),
        (("preflight", "--job", "nobody"), 1, "there is no job nobody"),
        (("ps", "--ended", "--job", "nobody"), 1, "there is no job nobody"),
        (("export", "--job", "nobody", "-o", "/tmp/nothing"), 1, "there is no job nobody"),
        (("vars", "--job", "nobody", "loss"), 1, "there is no job nobody"),
        (("config", "sampling.hz=7", "--job", "nobody"), 1, "there is no job nobody"),
        (("ranks", "check", "--job", "nobody"), 1, "there is no job nobody"),
        (("ps", "-o", "/tmp/ps.yaml"), 2, "unknown suffix .yaml"),
        (("query", "SELECT 1", "-o", "x.xlsx"), 2, "unknown suffix .xlsx"),
        (("profile", "-o", "p.html"), 2, "unknown suffix .html"),
        (("flamegraph", "-o", "p.html"), 2, "unknown suffix .html"),
        (("cluster", "list", "-o", "x.jsno"), 2, "unknown suffix .jsno"),
        (("nccl", "--comm", "defautl_pg"), 1, "there is no communicator defautl_pg"),
        (("top", "--once", "--interval", "5s"), 2, "--once prints one frame"),
        (("profile", "--hz", "19"), 2, "--hz needs --seconds"),
        (("diagnose", "--since", "1h"), 2, "--since needs --history"),
        (("diagnose", "--until", "1h"), 2, "--until needs --history"),
        (("diagnose", "--full"), 2, "--full needs --history"),
        (("diagnose", "abcd", "--history"), 2, "exclude each other"),
        (("diagnose", "abcd"), 1, "there is no finding abcd on this node"),
        (("ps", "--since", "1h"), 2, "--since and --until need --ended"),
        (("logs", "--since", "5m", "--until", "10m"), 2, "--until 10m is not after --since 5m"),
        (("nccl", "--since", "25:00"), 2, "25:00 is not a time"),
        (("ps", "--tz", "Mars/Base"), 2, "mars/base is not a time zone"),
    ],
)
def test_every_error_is_one_line_and_a_hint(
    pair: tuple[FakeNode, FakeNode], ctl: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    got, out, err = ctl(*arguments)
    lines = err.splitlines()
    assert (got, out, len(lines)) == (code, "", 2), err
    assert lines[0].startswith("error: ")
    assert says.lower() in lines[0].lower()
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("ps", "--jbo", "4711"), "did you mean --job? `probingctl ps --help` shows what it takes"),
        (("ps", "--formt", "json"), "did you mean --format? `probingctl ps --help` shows what it takes"),
        (("profile", "--of-cpu"), "did you mean --off-cpu? `probingctl profile --help` shows what it takes"),
        (("ps", "--xyzzy"), "`probingctl ps --help` shows what it takes"),
    ],
)
def test_a_misspelt_option_is_guessed(ctl: Run, arguments: tuple[str, ...], hint: str) -> None:
    assert ctl(*arguments) == (2, "", f"error: no such option: {arguments[1]}\nhint: {hint}\n")


def _commands(text: str) -> list[str]:
    """Returns the names of the commands that a help text lists."""
    return [line.split()[0] for line in text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()]


def test_help_of_every_command_is_whole_at_80_columns(ctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, err = ctl()
    assert (code, err) == (0, "")
    assert ctl("--help") == (0, text, "")
    names = _commands(text)
    assert {"ps", "events", "top", "nccl", "query", "export", "cluster"} <= set(names)
    folders = ("cluster", "group", "ranks")
    words = [(name,) for name in names if name not in folders]
    words += [(folder, name) for folder in folders for name in _commands(ctl(folder, "--help")[1])]
    assert {("cluster", "list"), ("group", "create"), ("ranks", "check")} <= set(words)
    for command in words:
        code, shown, _ = ctl(*command, "--help")
        assert code == 0
        assert "\n  Examples:\n    probingctl " in shown, command
        text += shown
    # "..." follows what may be given several times.
    cut = re.sub(r"\[(ARGS|PID)\]\.\.\.|(NAME|VALUE|WORKER|COMMAND)\.\.\.", "", text)
    assert "..." not in cut
    assert max(map(len, text.splitlines())) <= 80
    assert ctl("cluster")[0] == 0


def test_who_may_not_connect_hears_which_group_may(open_tmp_path: Path, ctl: Run) -> None:
    with FakeNode(open_tmp_path, "n") as node:
        path = node.address.removeprefix("unix:")
        os.chown(path, -1, grp.getgrnam("daemon").gr_gid)
        Path(path).chmod(0o060)
        was = os.geteuid()
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            code, _, err = ctl("status", "-t", node.address)
            # Nor does `top` repeat the error for ever.
            assert ctl("top", "-t", node.address) == (code, "", err)
        finally:
            os.seteuid(was)
    assert (code, err) == (
        1,
        f"error: {node.address} does not answer: permission denied\n"
        "hint: root and the group daemon may connect: `sudo usermod -aG daemon nobody`, then log in again\n",
    )


def test_what_a_node_says_of_its_error_is_passed_on(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    pair[0].error = QueryRejected("getenv is not allowed\x1b[31m", hint="leave it out")
    assert ctl("query", "SELECT 1") == (1, "", "error: getenv is not allowed\\x1b[31m\nhint: leave it out\n")


def test_a_node_that_hangs_is_named(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    pair[1].hold = threading.Event()
    code, out, err = ctl("cluster", "query", "SELECT count(*) AS n FROM comm.ops", "--timeout", "1s", "-f", "json")
    assert (code, json.loads(out)) == (0, [{"n": 100}])
    assert err.startswith(f"warning: node {pair[1].address} is missing: no answer")


@pytest.mark.parametrize(
    ("garbage", "says"),
    [
        ([], "the answer broke off"),
        ([pb.QueryReply(arrow=b"\xff" * 100)], "not an Arrow stream"),
        ([pb.QueryReply(end=pb.QueryEnd(node="x"))], "not an Arrow stream"),
        ([pb.QueryReply(arrow=_BROKEN), pb.QueryReply(end=pb.QueryEnd())], "not an Arrow stream"),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    pair: tuple[FakeNode, FakeNode], ctl: Run, garbage: list[pb.QueryReply], says: str
) -> None:
    pair[0].garbage = garbage
    code, out, err = ctl("query", "SELECT 1")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert says in err


def test_an_answer_has_a_limit(pair: tuple[FakeNode, FakeNode]) -> None:
    with Cluster(pair[0].address, max_bytes=10_000) as cluster, pytest.raises(QueryMemory, match="larger than"):
        cluster.query("SELECT * FROM comm.ops")


def test_top_lives_on_a_terminal_until_it_is_interrupted(pair: tuple[FakeNode, FakeNode]) -> None:
    ours, theirs = pty.openpty()
    program = "import sys; from probing.client.main import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "top", "--all-nodes"]
    top = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while b"WAITING 35.0 s" not in seen:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 65536)
        top.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
        assert top.wait(60) == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def test_warnings_of_nodes_reach_stderr(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    pair[0].warnings = ["segment x was set aside"]
    assert ctl("query", "SELECT 1 AS one")[2] == "warning: alpha: segment x was set aside\n"


@pytest.mark.parametrize("where", [(), ("--all-nodes",)])
@pytest.mark.parametrize(
    "command",
    [
        *(
            "ps",
            "ps --ended",
            "events",
            "top --once",
            "nccl",
            "balance",
            "logs",
            "net",
            "rdma",
            "gpu",
            "memory",
            "topo",
        ),
        *("ranks check", "nodes", "diagnose --history", "query SELECT_COUNT", "query SELECT_PID"),
    ],
)
def test_each_command_warns_of_rows_that_a_node_lacks(
    pair: tuple[FakeNode, FakeNode], ctl: Run, command: str, where: tuple[str, ...]
) -> None:
    sql = {"SELECT_COUNT": "SELECT count(*) FROM process.processes", "SELECT_PID": "SELECT pid FROM process.processes"}
    pair[0].warnings = ["comm.ops: 1 damaged segment left out"]
    for node in pair:
        node.settings["logs.enabled"] = "true"
    code, _, err = ctl(*(sql.get(word, word) for word in command.split()), *where)
    assert (code, err) == (0, "warning: alpha: comm.ops: 1 damaged segment left out\n")


@pytest.mark.parametrize("where", [(), ("--all-nodes",)])
@pytest.mark.parametrize("sql", ["SELECT pid FROM process.processes", "SELECT count(*) FROM process.processes"])
def test_rows_that_are_missing_are_an_error_under_strict(
    pair: tuple[FakeNode, FakeNode], ctl: Run, where: tuple[str, ...], sql: str
) -> None:
    assert ctl("query", "--strict", *where, sql)[0] == 0
    pair[0].warnings = ["rows of the last seconds are missing: no space"]
    code, _, err = ctl("query", "--strict", *where, sql)
    assert code == 4
    assert "alpha does not have all rows: rows of the last seconds are missing: no space" in err


def test_text_of_targets_cannot_drive_the_terminal(tmp_path: Path, ctl: Run) -> None:
    evil = "\x1b]0;owned\x07\u202e\x9b2J"
    rows = {"process.processes": [process("n", 0, 5, command=evil, job=evil)]}
    with FakeNode(tmp_path, "evil", rows) as node:
        node.threads = [thread(0, 5, 5, evil, (evil, evil, 1))]
        for command in (("ps",), ("stacks",), ("top", "--once")):
            for kind in ("table", "json", "jsonl"):
                code, out, err = ctl(*command, "-t", node.address, "-f", kind)
                assert code == 0
                assert not set(out + err) & {"\x1b", "\x07", "\u202e", "\x9b"}


def test_the_token_goes_along(pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    assert ctl("ps", "--token-file", str(file))[0] == 0
    assert pair[0].metadata[-1]["authorization"] == "Bearer s3cret"


def test_the_python_client(pair: tuple[FakeNode, FakeNode]) -> None:
    with Cluster(pair[0].address, all_nodes=True) as cluster:
        assert cluster.query("SELECT count(*) AS n FROM comm.ops").to_pylist() == [{"n": 200}]
        assert cluster.ps().num_rows == 5
        assert len(cluster.stacks(job="j1").threads) == 6
        assert cluster.addresses() == (pair[0].address, pair[1].address)
    with Cluster("unix:/nonexistent/socket") as cluster, pytest.raises(PeerError):
        cluster.query("SELECT 1")


def test_no_command_pays_for_anothers_libraries(pair: tuple[FakeNode, FakeNode]) -> None:
    def loaded(*commands: list[str]) -> Iterator[tuple[list[str], set[str]]]:
        """The modules that are loaded after each of several commands of one process."""
        program = """
import json, sys
from contextlib import suppress
from probing.client import interrupt
from probing.client.main import main
def leave(code):
    raise SystemExit(code)
interrupt.leave = leave
stdout, sys.stdout = sys.stdout, sys.stderr
for sys.argv[1:] in json.loads(sys.argv[1]):
    with suppress(SystemExit):
        main()
    # numpy is hidden behind None.
    print(json.dumps(sorted(name for name, module in sys.modules.items() if module)), file=stdout)
"""
        words = [sys.executable, "-c", program, json.dumps(commands)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        for command, line in zip(commands, done.stdout.splitlines(), strict=True):
            yield command, set(json.loads(line))

    engines = {"duckdb", "sqlglot", "textual", "prompt_toolkit"}
    wire = {"grpc", "google", "probing.client.wire.node"}
    rows = {"pyarrow", "pyarrow.compute", "numpy", "pyarrow.parquet"}
    # typer needs pydantic from 0.29 on.
    nobodys = {"pydantic", "numpy", "pyarrow.compute"}
    for words, modules in loaded(["version"], ["--version"], ["--help"], ["ps", "--help"], []):
        assert not modules & (engines | wire | rows | nobodys), words
    for words, modules in loaded(["stacks"], ["status"], ["config"], ["stacks", "--merge"]):
        assert "grpc" in modules
        assert not modules & (engines | rows | nobodys), words
    commands = (["ps"], ["nccl"], ["top", "--once"], ["query", "SELECT now()"], ["profile", "-F", "folded"])
    for words, modules in loaded(*commands):
        assert "pyarrow" in modules
        assert not modules & (engines | nobodys), words


@pytest.mark.parametrize(
    "words",
    # The gate takes one of each way to write.
    [
        "ps",
        long_unless(False, "events"),
        long_unless(False, "top --once"),
        long_unless(False, "nccl"),
        "nccl -f json",
        "logs",
        long_unless(False, "tables"),
        long_unless(False, "status"),
        long_unless(False, "nodes"),
        long_unless(False, "stacks"),
        "stacks --merge",
        long_unless(False, "profile"),
        "profile -F svg",
        long_unless(False, "flamegraph"),
        long_unless(False, "config"),
        long_unless(False, "query 'SELECT 1'"),
        long_unless(False, "rdma"),
        long_unless(False, "net"),
        "query 'SELECT 1' -f parquet",
        long_unless(False, "version"),
        long_unless(False, "--version"),
        "--help",
        long_unless(False, "ps --help"),
        long_unless(False, ""),
        "nonsense",
        long_unless(False, "query --explain 'SELECT 1'"),
        long_unless(False, "vars nothing"),
        "ps -t unix:/nowhere",
        "export --tables comm.ops -o {tmp}/x.csv",
    ],
)
def test_nobody_reads_the_output_to_its_end(pair: tuple[FakeNode, FakeNode], words: str, tmp_path: Path) -> None:
    pair[0].settings["logs.enabled"] = "true"
    program = "from probing.client.main import main; main()"
    asked = [sys.executable, "-c", program, *shlex.split(words.replace("{tmp}", str(tmp_path)))]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(asked, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    fails = words.startswith(("nonsense", "vars", "ps -t"))
    assert done.returncode == (141 if not fails else 2 if words == "nonsense" else 1), done.stderr
    assert fails or done.stderr == "" or words.startswith(("logs", "profile", "export"))
    # And nobody reads what it complains of.
    assert subprocess.run(asked, stdout=theirs, stderr=theirs, timeout=60).returncode == done.returncode
    os.close(theirs)


def test_a_terminal_of_ascii_gets_ascii(tmp_path: Path) -> None:
    names = [("réduire", "/home/é/train.py", 3)]
    with FakeNode(tmp_path, "n") as node:
        node.threads = [thread(rank, 5 + rank, 5 + rank, "MainThread", *names * rank) for rank in range(3)]

        def shown(language: dict[str, str]) -> str:
            program = "from probing.client.main import main; main()"
            words = [sys.executable, "-c", program, "stacks", "--merge", "-t", node.address]
            kept = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL", "LC_CTYPE")}
            done = subprocess.run(words, capture_output=True, env={**kept, **language}, timeout=60)
            assert (done.returncode, done.stderr) == (0, b"")
            return done.stdout.decode("latin-1" if "PYTHONIOENCODING" in language else "utf-8")

        for locale in ({"LANG": "C"}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"}):
            assert "  |- [0] (no Python frame)\n  `- [1-2] réduire" in shown(locale), locale
        assert "  ├─ [0] (no Python frame)\n  └─ [1-2] réduire" in shown({"LC_ALL": "C.UTF-8"})


def test_a_closed_pipe_is_no_error(pair: tuple[FakeNode, FakeNode]) -> None:
    command = f"{sys.executable} -c 'import sys; from probing.client.main import main; sys.exit(main())'"
    sql = "SELECT a.* FROM comm.ops a, comm.ops b"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} query '{sql}' -f jsonl | head -n 1"], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", ["rows", "rows.txt", "rows.log", ".hidden"])
def test_a_file_without_a_format_in_its_name_gets_the_table(
    pair: tuple[FakeNode, FakeNode], ctl: Run, tmp_path: Path, name: str
) -> None:
    for words in ((), ("-f", "table")):
        file = tmp_path / (name if not words else f"{name}.of-my-own")
        assert ctl("ps", "-o", str(file), *words)[0] == 0
        assert file.read_text().startswith("NODE ")


def test_top_ends_where_the_first_answer_is_an_error(pair: tuple[FakeNode, FakeNode], ctl: Run) -> None:
    pair[0].refused = Unauthenticated("the token is wrong")
    error = "error: the token is wrong\nhint: give the node's token by --token-file or PROBING_AUTH_TOKEN\n"
    assert ctl("top") == (1, "", error)
    assert ctl("top", "--all-nodes") == (1, "", error)
    for word in ("unix:/nowhere.sock", "127.0.0.1:1"):
        code, out, err = ctl("top", "-t", word)
        assert (code, out, err.splitlines()[0].startswith(f"error: {word} does not answer: ")) == (1, "", True)
        assert err.splitlines()[1].startswith("hint: is probingd running on that node")


class _Web(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("words", [("status",), ("ps", "--all-nodes"), ("query", "SELECT 1"), ("top",), ("diagnose",)])
def test_a_port_of_another_service_is_named(ctl: Run, words: tuple[str, ...]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        code, out, err = ctl(*words, "-t", address)
        server.shutdown()
    assert (code, out) == (1, "")
    assert err == (
        f"error: {address} is not probingd: it does not speak gRPC\n"
        "hint: another service listens there: -t takes the socket, or the port of `listen`, not the port of `http`\n"
    )


@pytest.mark.parametrize("width", [80, 60])
def test_what_a_column_means_is_wrapped_between_words(
    pair: tuple[FakeNode, FakeNode], ctl: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    for words in (("tables", "comm.ops"), ("tables",), *([("config",)] if width == 80 else [])):
        shown = ctl(*words)[1].replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert max(map(len, shown.splitlines())) <= width
        assert not set(shown) & set("…~")
        if words[-1] == "comm.ops":
            for column in TABLES["comm.ops"].columns:
                assert " ".join(column.doc.split()) in " ".join(shown.split())


def test_a_terminal_of_twenty_columns(pair: tuple[FakeNode, FakeNode]) -> None:
    commands = ["ps", "nccl", "top --once", "stacks --merge", "memory", "net", "status", "tables comm.ops", "balance"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "COLUMNS"))}
    outputs = _on_a_terminal([*commands, "events"], 20, {**kept, "LANG": "C", "TZ": "Mars/Base"})
    assert all(output and all(line.isascii() for line in output) for output in outputs)


def test_times_are_those_of_the_zone_in_tables_alone(
    pair: tuple[FakeNode, FakeNode], ctl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sql = "SELECT make_timestamp_ns(1795717800123456789) AS t"
    in_utc, there = "2026-11-26 18:30:00.123Z", "2026-11-27 02:30:00.123+08:00"
    assert ctl("query", sql)[1].splitlines()[1] == in_utc
    assert ctl("query", sql, "--tz", "Asia/Shanghai")[1].splitlines()[1] == there
    monkeypatch.setenv("PROBING_TZ", "+08:00")
    assert ctl("query", sql)[1].splitlines()[1] == there
    assert ctl("query", sql, "--tz", "UTC")[1].splitlines()[1] == in_utc
    # Programs get UTC, whatever people like.
    for form in ("json", "jsonl", "csv"):
        assert "2026-11-26T18:30:00.123456789Z" in ctl("query", sql, "-f", form)[1]
    monkeypatch.delenv("PROBING_TZ")
    file = tmp_path / "probing" / "client.toml"
    file.parent.mkdir()
    file.write_text('tz = "Asia/Shanghai"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert ctl("query", sql)[1].splitlines()[1] == there
    file.write_text('zone = "UTC"\n')
    code, _, err = ctl("query", sql)
    assert (code, err.splitlines()[0]) == (2, f"error: {file}: there is no setting zone")


@pytest.mark.parametrize(
    "words",
    [
        ("nccl",),
        ("balance",),
        ("net",),
        ("logs",),
        ("events",),
        ("ps", "--ended"),
        ("rdma",),
        ("profile",),
        ("diagnose", "--history"),
    ],
)
def test_every_command_takes_instants_and_lengths(
    pair: tuple[FakeNode, FakeNode], ctl: Run, words: tuple[str, ...]
) -> None:
    pair[0].settings["logs.enabled"] = "true"
    printed = (
        ("2026-11-27 02:10:00Z", "2026-11-27T02:30:00.000000000Z", ("1795745400", "2026-11-27 02:10:00")),
        ("2h10m", "1.5h", ("INTERVAL 7800000 MILLISECOND",)),
        ("00:00:01Z", "now", ("make_timestamp_ns(", "TIMESTAMP '")),
    )
    for since, until, begins in printed:
        pair[0].asked.clear()
        code, _, err = ctl(*words, "--since", since, "--until", until)
        # Of samples alone nothing is an error.
        assert code == 0 or (words, code) == (("profile",), 1), err
        assert any(begin in sql for sql in pair[0].asked for begin in begins)
    code, _, err = ctl(*words, "--since", "soon")
    assert (code, err.splitlines()[0]) == (2, "error: soon is not a time")
