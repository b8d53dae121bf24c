"""``probingctl logs`` over two nodes with known lines."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import client_fake_node as fake_node
import pytest
from client_fake_node import SECOND, FakeNode, process

from probing.client.cluster import Cluster
from probing.client.commands import logs
from probing.client.main import main
from probing.client.times import interval


def line(node: str, rank: int, ago_s: int, kind: str, text: str, **more: Any) -> dict[str, Any]:
    """A row of process.logs."""
    return {
        "node": node,
        "ts": time.time_ns() - ago_s * SECOND,
        "job": "j1",
        "run": "r1",
        "pid": 1000 + rank,
        "start_ns": SECOND,
        "tid": 1000 + rank,
        "rank": rank,
        "stream": "stderr",
        "kind": kind,
        "line": text,
        "suppressed": 0,
        **more,
    }


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[FakeNode]]:
    alpha = [
        line("alpha", 0, 30, "NCCL WARN", "host:1 [0] NCCL WARN gone\x1b[31m"),
        line("alpha", 1, 7200, "out of memory", "long ago"),
    ]
    beta = [line("beta", 2, 20, "out of memory", "CUDA out of memory", stream="stdout", suppressed=1200)]
    made = [
        FakeNode(tmp_path, "alpha", {"process.logs": alpha, "process.processes": [process("alpha", 0, 1000)]}),
        FakeNode(tmp_path, "beta", {"process.logs": beta}),
    ]
    yield made
    for node in made:
        node.stop()


@pytest.fixture
def ask(nodes: list[FakeNode], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["logs", "--nodes", ",".join(node.address for node in nodes), *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_lines_stand_in_the_order_of_their_time(ask: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = ask("-f", "json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [(row["node"], row["rank"], row["kind"], row["suppressed"]) for row in rows] == [
        ("alpha", 0, "NCCL WARN", 0),
        ("beta", 2, "out of memory", 1200),
    ]
    assert list(rows[0]) == [
        "node",
        "ts",
        "job",
        "run",
        "rank",
        "pid",
        "tid",
        "stream",
        "kind",
        "line",
        "suppressed",
    ]


def test_lines_for_people(ask: Callable[..., tuple[int, str, str]]) -> None:
    first, second = ask()[1].splitlines()
    assert first[12:] == "Z job j1 rank 0 on alpha stderr: host:1 [0] NCCL WARN gone\\x1b[31m"
    # One job was asked for.
    assert ask("--job", "j1")[1].splitlines()[0][12:].startswith("Z rank 0 on alpha stderr: ")
    assert (
        second[12:] == "Z job j1 rank 2 on beta stdout: CUDA out of memory  (1,200 such lines before it were left out)"
    )
    assert first[:12].count(":") == 2


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("--rank", "2"), [2]),
        (("--kind", "MEMORY"), [2]),
        (("--kind", "memory", "--since", "3h"), [1, 2]),
        (("--job", "j1", "--kind", "warn"), [0]),
    ],
)
def test_lines_are_chosen(ask: Callable[..., tuple[int, str, str]], words: tuple[str, ...], ranks: list[int]) -> None:
    assert [row["rank"] for row in json.loads(ask(*words, "-f", "json")[1])] == ranks


def test_nothing_is_explained(ask: Callable[..., tuple[int, str, str]], nodes: list[FakeNode]) -> None:
    for node in nodes:
        node.settings["logs.enabled"] = "false"
    code, out, err = ask("--since", "5s")
    assert (code, out) == (0, "(no line was stored in the last 5 s)\n")
    assert err.startswith("warning: lines are not collected: `probingctl config logs.enabled=true`")
    nodes[0].settings["logs.enabled"] = "true"
    assert ask("--since", "5s")[2] == ""
    code, _, err = ask("--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")


def test_follow_shows_no_line_again_when_a_clock_is_set_back(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    nodes[0].insert("process.logs", [line("alpha", 0, 3000, "NCCL WARN", "an hour ago")])
    with Cluster(nodes[0].address) as cluster:
        chosen = logs.Filter("j1", None, None)
        going = logs.followed(cluster, chosen, logs.collect(cluster, chosen, interval("1h")))
        assert "an hour ago" in [row["line"] for row in next(going)[0]]
        assert next(going) == ([], True)
        # WHEN the node's clock goes back by the hour, all lines since are newer than its last minute
        back = fake_node.time.time_ns() - 3000 * 10**9
        monkeypatch.setattr(fake_node.time, "time_ns", lambda: back)
        assert next(going) == ([], True)
        nodes[0].insert("process.logs", [line("alpha", 0, 0, "NCCL WARN", "new")])
        assert [row["line"] for row in next(going)[0]] == ["new"]


def test_follow_shows_each_line_once(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    with Cluster(nodes[0].address, nodes=tuple(node.address for node in nodes)) as cluster:
        chosen = logs.Filter("j1", None, None)
        going = logs.followed(cluster, chosen, logs.collect(cluster, chosen, interval("60")))
        assert [row["rank"] for row in next(going)[0]] == [0, 2]
        assert next(going) == ([], True)
        nodes[1].insert("process.logs", [line("beta", 3, 0, "NCCL WARN", "new")])
        assert [row["line"] for row in next(going)[0]] == ["new"]
        assert next(going) == ([], True)


def test_follow_says_that_lines_were_left_out(
    ask: Callable[..., tuple[int, str, str]], nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(count: int) -> None:
        nodes[1].insert("process.logs", [line("beta", 3, 0, "NCCL WARN", f"{count} {at}") for at in range(count)])

    # Two lines are there at first, and an answer has five: of the seven lines two are lost.
    looks = iter((lambda: None, lambda: come(3), lambda: come(7), lambda: None))
    collect = logs.collect

    def looked(*arguments: Any) -> list[dict[str, Any]]:
        try:
            next(looks)()
        except StopIteration:
            raise KeyboardInterrupt from None
        return collect(*arguments)

    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    monkeypatch.setattr(logs, "MOST_LINES", 5)
    monkeypatch.setattr(logs, "collect", looked)
    code, out, err = ask("--follow")
    assert (code, len(out.splitlines())) == (130, 2 + 3 + 5)
    assert err.splitlines() == ["warning: more than 5 lines came at once: only the last 5 are shown"]


def test_follow_keeps_no_answer(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    with Cluster(nodes[0].address, nodes=tuple(node.address for node in nodes)) as cluster:
        going = logs.followed(cluster, logs.Filter("j1", None, None), [])
        kept = []
        for rows, _ in itertools.islice(going, 4):
            kept.append(len(cluster.outcomes))
            assert len(rows) <= 2
    assert kept[1:] == [1, 1, 1]


def test_follow_warns_of_a_node_that_goes_away(
    ask: Callable[..., tuple[int, str, str]], nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((None, None, nodes[1].stop, None, None))
    collect = logs.collect

    def looked(*arguments: Any) -> list[dict[str, Any]]:
        try:
            meanwhile = next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None
        if meanwhile is not None:
            meanwhile()
        return collect(*arguments)

    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    monkeypatch.setattr(logs, "collect", looked)
    code, out, err = ask("--follow")
    assert (code, len(out.splitlines())) == (130, 2)
    (warning,) = err.splitlines()
    assert warning.startswith(f"warning: node {nodes[1].address} is missing: ")


def test_follow_has_no_end(ask: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = ask("--follow", "--until", "5m")
    assert (code, err.splitlines()[0]) == (2, "error: --follow shows lines after now, and --until ends the interval")


@pytest.mark.parametrize("words", [("--follow", "-f", "json"), ("--follow", "-o", "/tmp/x")])
def test_follow_has_no_end_to_write(ask: Callable[..., tuple[int, str, str]], words: tuple[str, ...]) -> None:
    code, _, err = ask(*words)
    assert (code, err.startswith("error: --follow writes")) == (2, True)
