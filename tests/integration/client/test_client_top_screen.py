"""The screen of ``top`` in tmux at 80x24 and 200x60: what it shows, each key, ranks and nodes that come and go."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_fake_node import FakeNode, process, thread
from client_top_scene import RANKS, SLOW, Scene, top
from long import long_unless
from rich.cells import cell_len
from waiting import until

SIZES = ((80, 24), (200, 60))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Scene(tmp_path) as scene:
        yield scene


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_the_job_in_trouble_stands_first(scene: Scene, columns: int, lines: int) -> None:
    with top(scene.first.address, columns, lines, "--all-nodes") as terminal:
        shown = terminal.shows("STUCK", "SLOW", "read_batch", "all_reduce #50", "100%", "UTIL", "GPU0")
        text = " ".join(shown.split())
        assert "rank 2 has not called all_reduce seq 50 of default_pg, for which ranks 0-1,3 wait" in text
        assert SLOW in text
        assert shown.index("STUCK") < shown.index("SLOW") < shown.index("job resnet")
        assert max(cell_len(line) for line in shown.splitlines()) <= columns
        assert len(shown.splitlines()) == lines
        ranks = [line.split()[:2] for line in shown.splitlines() if re.match(r"[!.] +\d", line)]
        assert ranks[:4] == [["!", "2"], [".", "0"], [".", "1"], [".", "3"]]
        if columns == 200:
            shown = terminal.shows("POWER", "TEMP", "GMEM", "RSS", "STEP/S", "COLL/S", "140W ▂▂▂▂▂▂")
        colours = terminal.screen(colours=True)
        assert re.search(r"\x1b\[[\d;]*41m[^\x1b]*STUCK", colours), "STUCK is on red"


def test_each_key_of_the_main_page(scene: Scene) -> None:
    with top(scene.first.address, 80, 24, "--all-nodes") as terminal:
        terminal.shows("rank 2  pid 1002")
        terminal.press("j")
        terminal.shows("rank 0  pid 1000")
        terminal.press("k")
        terminal.shows("rank 2  pid 1002")
        terminal.press("G")
        terminal.shows("rank 0  pid 3000", "job resnet")
        terminal.press("g")
        terminal.shows("rank 2  pid 1002")
        terminal.press("NPage")
        terminal.lacks("rank 2  pid 1002")
        terminal.press("Home")
        terminal.press("s")
        terminal.shows("sort: rank")
        terminal.press("r")
        terminal.shows("sort: rank reversed")
        terminal.press("S")
        terminal.shows("sort: trouble")
        terminal.press("/", *"resnet")
        terminal.shows("filter: resnet")
        terminal.lacks("job llm-7b")
        terminal.press("Enter")
        terminal.shows("filter: resnet  q")
        terminal.press("Escape")
        terminal.shows("job bert")
        # What is selected stays so.
        terminal.shows("rank 0  pid 3000")
        terminal.press("g")
        terminal.shows("job llm-7b")
        terminal.press("?")
        terminal.shows("KEYS", "SLOW WARNING")
        terminal.press("?")
        terminal.shows("job llm-7b")
        terminal.press("q")
        # stty: the terminal reads lines again.
        terminal.shows("ended with 0\n1\n")


@pytest.mark.parametrize(("columns", "lines"), [SIZES[0], long_unless(False, *SIZES[1])])
def test_enter_opens_the_page_of_a_rank(scene: Scene, columns: int, lines: int) -> None:
    with top(scene.first.address, columns, lines, "--all-nodes") as terminal:
        terminal.shows("rank 2  pid 1002")
        terminal.press("Enter")
        shown = terminal.shows("STACK", "main (/home/user/train.py:88)", "LAST COLLECTIVES", "2.85 GB/s")
        assert "VARIABLES" in shown
        assert max(cell_len(line) for line in shown.splitlines()) <= columns
        terminal.press("G")
        terminal.shows("batch = <Tensor [32, 128]>")
        terminal.press("Escape")
        terminal.shows("job llm-7b")


def test_a_pause_stops_the_questions(scene: Scene) -> None:
    with top(scene.first.address, 80, 24, "--all-nodes", "--interval", "200ms") as terminal:
        terminal.shows("STUCK", "100%")
        terminal.press("p")
        terminal.shows("PAUSED: p goes on")
        scene.ranks = [rank for rank in RANKS if rank[0] != "resnet"]
        terminal.press("G")
        assert "job resnet" in terminal.shows("pid 3000")
        terminal.press("p")
        terminal.lacks("job resnet", "PAUSED")


def test_ranks_appear_and_vanish(scene: Scene) -> None:
    scene.ranks = [rank for rank in RANKS if rank[:2] != ("llm-7b", 3)]
    with top(scene.first.address, 80, 24, "--all-nodes", "--interval", "200ms") as terminal:
        terminal.shows("job llm-7b  run r1  3 of 4 ranks")
        scene.ranks = list(RANKS)
        terminal.shows("job llm-7b  run r1  4 of 4 ranks")
        terminal.press("j", "j", "j")
        terminal.shows("rank 3  pid 1003")
        scene.ranks = []
        terminal.shows("no training process")
        scene.ranks = list(RANKS)
        terminal.shows("job resnet")


def test_a_node_that_goes_away_is_named_and_comes_back(scene: Scene) -> None:
    with top(scene.first.address, 80, 24, "--all-nodes", "--interval", "200ms") as terminal:
        terminal.shows("STUCK", "rank 2  pid 1002")
        scene.leave("beta")
        terminal.shows("no answer for", "from beta: ", "job llm-7b  run r1  4 of 4 ranks")
        shown = terminal.shows("the node d")
        assert re.search(r"^\? +2 beta", shown, re.M)
        # The others go on.
        terminal.press("G")
        terminal.shows("rank 0  pid 3000")
        scene.ranks = [rank for rank in RANKS if rank[0] != "resnet"]
        terminal.lacks("job resnet")
        scene.come_back("beta")
        terminal.lacks("no answer for", "the node d")


def test_a_socket_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with top(f"unix:{tmp_path / 'nowhere.sock'}", 80, 24) as terminal:
        terminal.shows("there is no such socket", "hint: is probingd running", "ended with 1")


def test_a_slow_node_is_waited_for(scene: Scene) -> None:
    scene.first.hold_status = threading.Event()
    try:
        with top(scene.first.address, 80, 24) as terminal:
            shown = terminal.shows("probingctl top", "q quit")
            assert "no training process" not in shown
            terminal.press("j", "Enter")
            scene.first.hold_status.set()
            terminal.shows("job llm-7b")
            terminal.press("q")
            terminal.shows("ended with 0")
    finally:
        scene.first.hold_status.set()


def test_the_screen_follows_its_size(scene: Scene) -> None:
    with top(scene.first.address, 200, 60, "--all-nodes") as terminal:
        terminal.shows("COLL/S", "STUCK")
        for columns, lines in ((80, 24), (40, 10), (20, 4), (132, 43)):
            terminal.resize(columns, lines)
            until(lambda lines=lines, columns=columns: _fits(terminal.screen(), columns, lines), what=terminal.screen)
        terminal.shows("STUCK", "GMEM")


def _fits(screen: str, columns: int, lines: int) -> bool:
    found = screen.split("\n")[:-1]
    wide = len(found) == lines and all(cell_len(line) <= columns for line in found)
    return wide and found[0].startswith("probingctl top"[:columns]) and found[-1].startswith("q ")


def test_tables_that_a_node_lacks_leave_columns_out(tmp_path: Path) -> None:
    without = ("gpu.utilization", "gpu.processes", "cpu.utilization")
    with Scene(tmp_path, without=without) as scene, top(scene.first.address, 200, 60, "--all-nodes") as terminal:
        titles = terminal.shows("STUCK", "RSS", "11.2G").splitlines()[1].split()
        assert not {"CPU", "GPU", "UTIL", "GMEM", "POWER", "TEMP"} & set(titles)


def test_text_of_targets_cannot_drive_the_screen(tmp_path: Path) -> None:
    evil = "[bold red]x[/]\x1b]0;owned\x07\u202e\x9b2J[link=file:///etc]y"
    with FakeNode(tmp_path, "evil", {"process.processes": [process("evil", 0, 5, command=evil, job=evil)]}) as node:
        node.threads = [thread(0, 5, 5, evil, (evil, evil, 1))]
        with top(node.address, 200, 60) as terminal:
            shown = terminal.shows("[bold red]x[/]\\x1b]0;owned\\x07\\u202e\\x9b2J[link=file:///etc]y")
            assert not set(shown) & {"\x1b", "\x07", "\u202e", "\x9b"}
            terminal.press("Enter")
            terminal.shows("STACK", "[bold red]x[/]\\x1b")


def test_without_a_terminal_frames_are_printed_as_lines(scene: Scene) -> None:
    program = "import sys; from probing.client.main import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "-t", scene.first.address, "top", "--interval", "100ms"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        heads = 0
        while heads < 2:
            line = child.stdout.readline()
            assert "\x1b" not in line
            heads += line.startswith("-- ")
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        assert child.wait() == 0
