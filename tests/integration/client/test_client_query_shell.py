"""The shell of query on a real terminal, and its parts without one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

import pytest
from client_fake_node import FakeNode, operation, process
from long import long_unless
from waiting import until

from probing.api.errors import QueryRejected
from probing.client.main import main
from probing.client.shell.prompt import trim_history
from probing.client.shell.words import candidates, is_whole, statements

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
# Only of its controlling terminal does a program get SIGINT for Ctrl-C.
_PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from probing.client.main import main
sys.argv = ["probingctl", "query"]
main()
"""
_SECONDS = 30.0


class Terminal:
    """``probingctl query`` on a pty of 100 columns."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        )
        os.close(theirs)
        self._seen = ""

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Returns the output up to the end of ``pattern``, without cursor movements."""
        deadline = time.monotonic() + _SECONDS
        while (match := re.search(pattern, self._seen)) is None:
            left = deadline - time.monotonic()
            assert select.select([self._ours], [], [], max(0.0, left))[0], f"{pattern!r} not in {self._seen!r}"
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                pytest.fail(f"it ended without {pattern!r}: {self._seen!r}")
            self._seen = _ANSI.sub("", self._seen + data.decode("utf-8", "replace"))
        taken, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return taken

    def ask(self, text: str, pattern: str) -> str:
        """Types ``text`` and Enter at the prompt."""
        self.until(r"(?:sql|all)>")
        self.send(text + "\r")
        return self.until(pattern)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    rows = {
        "process.processes": [process("n", rank, 1000 + rank, command="\x1b]0;owned\x07train.py") for rank in range(3)],
        "probing.column_docs": [
            {
                "node": "n",
                "ts": 0,
                "table_schema": "comm",
                "table_name": "ops",
                "column_name": "seq",
                "type": "int64",
                "description": "number of the operation",
            }
        ],
        "comm.ops": [operation("n", 0, seq, ts=seq) for seq in range(1500)],
    }
    with FakeNode(tmp_path_factory.mktemp("node"), "alpha", rows) as found:
        yield found


@pytest.fixture
def terminal(node: FakeNode, tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal({"PROBING_TARGET": node.address, "XDG_STATE_HOME": str(tmp_path)})
    yield found
    found.close()


def test_a_session(terminal: Terminal, node: FakeNode, tmp_path: Path) -> None:
    shown = terminal.ask("SELECT rank, pid\rFROM process.processes ORDER BY rank;", r"\(3 rows, [^)]*\)")
    assert re.search(r"rank\s+pid\s+0\s+1000\s+1\s+1001\s+2\s+1002", shown)
    assert "error: " in terminal.ask("SELECT nope FROM comm.ops;", r"hint: \w+")
    assert "-[ 1 ]-" in terminal.ask("SELECT * FROM process.processes;", r"\(3 rows")
    assert "one column per line: off" in terminal.ask("\\x off", r"off\r\n")
    wide = terminal.ask("SELECT command FROM process.processes LIMIT 1;", r"\(1 row, ")
    assert "\\x1b]0;owned\\x07train.py" in wide
    assert "(the first 1,000 rows; \\o FILE writes all" in terminal.ask("SELECT seq FROM comm.ops;", r"writes all")
    target = tmp_path / "rows.csv"
    # The name decides the format, and the next answer is a table again.
    terminal.ask(f"\\o {target}", r"goes to: \S+ as csv")
    terminal.ask("SELECT seq FROM comm.ops ORDER BY seq;", r"\(1,500 rows in \S+rows.csv, ")
    terminal.ask("SELECT 5 AS five;", r"five\s+5\s+\(1 row, ")
    terminal.ask("\\f csv", "csv")
    terminal.ask("\\set r=2", r"\$r: 2")
    assert re.search(r"rank\s+2", terminal.ask("SELECT rank FROM process.processes WHERE rank = $r;", r"rank\r\n2\r\n"))
    assert len(target.read_text().splitlines()) == 1501
    terminal.ask("\\f table", "table")
    terminal.ask("\\timing off", r"timing: off")
    terminal.ask("SELECT 7 AS seven;", r"\(1 row\)")
    terminal.ask("\\d comm.ops", r"seq +int64 +number of the operation")
    terminal.ask("\\all on", r"all nodes: on")
    terminal.ask("help", r"leave, as exit")
    assert "there is no command \\nope" in terminal.ask("\\nope", r"hint: ")
    terminal.ask("\\?", r"leave, as exit")
    # Up and Enter repeat the input before the last one.
    terminal.until(r"all>")
    terminal.send("\x1b[A\x1b[A\r")
    terminal.until(r"there is no command")
    terminal.until(r"all>")
    terminal.send("\x04")
    assert terminal.process.wait(_SECONDS) == 0
    history = tmp_path / "probingctl" / "history"
    assert "+FROM process.processes ORDER BY rank;" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_ends_the_query_and_not_the_shell(terminal: Terminal, node: FakeNode) -> None:
    terminal.until(r"sql>")
    node.hold = threading.Event()
    asked = len(node.asked)
    try:
        terminal.send("SELECT 1 AS held;\r")
        until(lambda: any("held" in sql for sql in node.asked[asked:]))
        terminal.send("\x03")
        terminal.until(r"cancelled")
    finally:
        node.hold.set()
        node.hold = None
    assert "5" in terminal.ask("SELECT 5 AS five;", r"\(1 row")
    # At the prompt it drops the input.
    terminal.until(r"sql>")
    terminal.send("SELECT \x03")
    terminal.ask("\\q", "")
    assert terminal.process.wait(_SECONDS) == 0


def test_tab_completes_tables(terminal: Terminal) -> None:
    terminal.until(r"sql>")
    terminal.send("SELECT count(*) AS n FROM process.proc\t")
    terminal.until(r"process\.processes")
    terminal.send(";\r")
    terminal.until(r"\(1 row")


def test_sql_of_a_pipe(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, code, says in (("SELECT 1 AS one;\n", 0, "one\n  1\n"), (" ", 2, "there is no SQL")):
        path = tmp_path / "in.sql"
        path.write_text(text)
        with path.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["query", "-t", node.address]) == code
        assert says in "".join(capsys.readouterr())


_WORDS = ("\\q", "exit", "quit", "EXIT;", "\\q;")
_BEFORE = ("", "SELECT seq\r", "SELECT 'open\rFROM\r")


# The gate takes each word, and each input, at least once.
@pytest.mark.parametrize(
    ("before", "word"),
    [
        long_unless(n % len(_BEFORE) == k, before, word)
        for n, word in enumerate(_WORDS)
        for k, before in enumerate(_BEFORE)
    ],
)
def test_the_shell_is_left_from_any_line(terminal: Terminal, before: str, word: str) -> None:
    terminal.until("sql>")
    terminal.send(f"{before}{word}\r")
    assert terminal.process.wait(_SECONDS) == 0


def test_a_command_amid_a_statement_leaves_it_to_be_finished(terminal: Terminal) -> None:
    terminal.ask("SELECT rank, pid", r"\.\.\.>")
    terminal.send("\\d comm.ops\r")
    assert "number of the operation" in terminal.until(r"number of the operation")
    terminal.ask("FROM process.processes ORDER BY rank LIMIT 1;", r"rank\s+pid\s+0\s+1000\s+\(1 row, ")


def test_an_interrupted_command_ends_with_130(node: FakeNode) -> None:
    node.hold = threading.Event()
    asked = len(node.asked)
    program = "import sys; from probing.client.main import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "query", "SELECT 1 AS held_too", "-t", node.address]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: any("held_too" in sql for sql in node.asked[asked:]))
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=_SECONDS)
    finally:
        node.hold.set()
        node.hold = None
        child.kill()
        child.wait()
    assert (child.returncode, out, err) == (130, "", "")


def test_a_refusal_of_a_node_is_printed(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    from probing.client.settings import Settings
    from probing.client.shell.loop import Shell

    node.error = QueryRejected("no", hint="leave it\x1b[31m")
    try:
        Shell(Settings(target=node.address)).take("SELECT 1;")
    finally:
        node.error = None
    assert capsys.readouterr().err == "error: no\nhint: leave it\\x1b[31m\n"


def test_no_row_is_not_said_where_a_node_does_not_answer(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from probing.client.settings import Settings
    from probing.client.shell.loop import Shell

    nodes = (node.address, f"unix:{tmp_path}/nobody.sock")
    sql = "SELECT pid FROM process.processes WHERE pid = 1;"
    Shell(Settings(target=node.address, nodes=nodes, all_nodes=True)).take(sql)
    out, err = capsys.readouterr()
    assert ("0 rows" in out, err.splitlines()[0]) == (False, "error: nothing was found on the nodes that answered")
    Shell(Settings(target=node.address)).take(sql)
    assert "(0 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found", "rest"),
    [
        ("SELECT 1;", ["SELECT 1"], ""),
        ("SELECT ';' AS \";\" -- ;\n, 1; SELECT 2", ["SELECT ';' AS \";\" -- ;\n, 1"], " SELECT 2"),
        ("SELECT 1 /* ; */", [], "SELECT 1 /* ; */"),
        (";;", [], ""),
    ],
)
def test_statements_end_with_semicolons(text: str, found: list[str], rest: str) -> None:
    assert statements(text) == (found, rest)


def test_when_enter_ends_the_input() -> None:
    assert all(is_whole(text) for text in ("", "\\d", "SELECT 1;", "SELECT 1; -- x"))
    assert not any(is_whole(text) for text in ("SELECT 1", "SELECT ';", "SELECT 1; SE"))


_TABLES = {"comm.ops": {"rank": "int32", "redop": "string"}, "comm.inflight": {"age_ns": "int64"}}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("SELECT * FROM comm.", "", ["comm.ops", "comm.inflight"]),
        ("SELECT * FROM comm.ops o, comm.in", "", ["comm.inflight"]),
        ("SELECT ra", " FROM comm.ops", ["rank"]),
        ("SELECT o.r", " FROM comm.ops o", ["o.rank", "o.redop"]),
        ("SELECT ops.ra", " FROM comm.ops", ["ops.rank"]),
        ("SEL", "", ["SELECT"]),
        ("sel", "", ["select"]),
        ("SELECT 'se", "", []),
        ("\\ti", "", ["\\timing"]),
        ("\\d comm.o", "", ["comm.ops"]),
        ("\\x a", "", ["auto"]),
    ],
)
def test_what_is_completed(before: str, after: str, expected: list[str]) -> None:
    assert [text for text, _, _ in candidates(before, before + after, lambda: _TABLES)] == expected


def test_history_is_bounded_and_private(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f"\n# then\n+SELECT {i};\n" for i in range(1000)))
    path.chmod(0o644)
    trim_history(path, 1000)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert len(text) <= 1000
    assert text.startswith("\n# then\n+SELECT ")
    assert text.endswith("+SELECT 999;\n")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        trim_history(link)
