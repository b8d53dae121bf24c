"""``diagnose --skill``: steps that run, are empty, are refused and are skipped; rules; files that are no skill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from client_fake_node import FakeNode, process

Run = Callable[..., tuple[int, str, str]]
SKILL = """
apiVersion: probing.dev/v1
kind: Skill
metadata:
  id: slow_rank
  title: 慢 rank
  title_en: Find the slow rank
  docs: |
    Compares the ranks.
spec:
  parameters:
    - {name: least, type: integer, default: 7, description: calls of a rank}
    - {name: job, type: string, default: "j1"}
    - {name: use_global, type: boolean, default: true}
  requires:
    any_tables: [python.comm_collective]
  variables:
    ops: "{use_global ? global.comm.ops : comm.ops}"
  steps:
    - id: by_rank
      title: Calls of each rank
      sql: |
        SELECT rank, count(*) AS calls, max(duration_ns) / 1e6 AS ms FROM {ops}
        WHERE job = '{job}' GROUP BY rank HAVING count(*) > {least} ORDER BY rank
      on_empty: abort
      empty_message: no operation of {job}
    - {id: view, title: Probing's own table, sql: "SELECT count(*) AS n FROM {comm_table}"}
    - {id: nothing, title: Nothing, sql: SELECT rank FROM comm.ops WHERE false, on_empty: warn, empty_message: none}
    - {id: refused, title: Refused, sql: DROP TABLE comm.ops}
    - {id: elsewhere, title: All nodes, sql: SELECT 1 AS one, when: "{use_global}"}
    - {id: ui, title: A page, type: ui, view: training}
  interpretation:
    rules:
      - id: many
        when: "step:by_rank | rows >= 4"
        severity: warning
        message: rank {by_rank.rank} of {by_rank.row_count}
      - {id: few, when: "step:by_rank | rows < {least} * 0.1", severity: error, message: never}
      - {id: empty, when: "step:nothing | rows == 0", message: "nothing at {ms} ms"}
  summary_template: "{by_rank.row_count} ranks, {unknown}"
  next_steps: ["look at rank 2"]
"""


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    (tmp_path / "steps.yaml").write_text(SKILL)
    return tmp_path / "steps.yaml"


def test_all_nodes(ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path) -> None:
    code, out, err = ctl("diagnose", "--all-nodes", "--skill", str(skill), "-f", "json")
    assert (code, err) == (3, "")
    found = json.loads(out)
    assert [(step["id"], step["status"]) for step in found["steps"]] == [
        ("by_rank", "ok"),
        ("view", "ok"),
        ("nothing", "empty"),
        ("refused", "skipped"),
        ("elsewhere", "ok"),
        ("ui", "skipped"),
    ]
    assert found["steps"][0]["rows"] == [{"rank": r, "calls": 50, "ms": 2.0} for r in range(4)]
    assert found["steps"][1]["rows"] == [{"n": 200}]
    assert [(f["rule"], f["severity"], f["message"]) for f in found["findings"]] == [
        ("many", "warning", "rank 0 of 4"),
        ("empty", "info", "nothing at 2 ms"),
    ]
    assert (found["summary"], found["next_steps"]) == ("4 ranks, {unknown}", ["look at rank 2"])


def test_a_node_that_does_not_answer_leaves_it_undecided(
    ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path
) -> None:
    text = SKILL.replace("- {id: empty, ", "- {id: full, ").replace(
        "step:nothing | rows == 0", "step:nothing | rows > 0"
    )
    skill.write_text(text)
    pair[1].stop()
    code, out, err = ctl("diagnose", "--all-nodes", "--skill", str(skill))
    assert (code, "  - none on the nodes that answered\n" in out) == (4, True)
    assert f"warning: node {pair[1].address} is missing: " in err


def test_one_node_and_people(ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path) -> None:
    skill.write_text(SKILL.replace("    - {id: view, title: Probing's own table", "    - {id: view, title: Another"))
    code, out, _ = ctl("diagnose", "--skill", str(skill), "--set", "least=9")
    assert code == 0
    parts = [
        "Find the slow rank (slow_rank)",
        "Calls of each rank",
        "rank  calls",
        "  empty: none",
        "  skipped: the step runs only",
        "Findings:\n  - info: nothing at 2 ms",
        "2 ranks",
        "Do next:\n  - look at rank 2",
    ]
    places = [out.lower().index(part.lower()) for part in parts]
    assert places == sorted(places)


def test_the_job_is_a_parameter(ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path) -> None:
    pair[0].insert("process.processes", [process("alpha", 0, 1500, job="no'body")])
    code, out, _ = ctl("diagnose", "--skill", str(skill), "--job", "no'body", "-f", "json")
    (step,) = json.loads(out)["steps"]
    assert (code, step["status"], step["note"]) == (4, "failed", "no operation of {job}")
    skill.write_text(SKILL.replace("name: job,", "name: work,"))
    code, _, err = ctl("diagnose", "--skill", str(skill), "--job", "j1")
    assert (code, err.splitlines()[0]) == (2, "error: the skill slow_rank has no parameter job")


@pytest.mark.parametrize(
    ("old", "new", "code", "problem"),
    [
        ("kind: Skill", "kind: Catalog", 1, "its apiVersion and kind are"),
        ("  steps:", "  steps: &a\n    - *a\n  more:", 1, "it uses aliases"),
        ("spec:", "spec: {", 1, "line "),
        ("    - id: by_rank\n", "    - id: view\n", 1, "step 'view' occurs twice"),
        ("default: 7", "default: seven", 1, "the default of parameter least is not of type integer"),
        ("rows >= 4", "slope(x) > 4", 1, "a rule of the skill slow_rank is not understood"),
        ("severity: warning", "severity: bad", 1, "severity of rule many"),
        ("[python.comm_collective]", "[hccl.tasks]", 1, "needs one of hccl.tasks"),
        ("spec:", "!!python/object/apply:os.system [false]: x\nspec:", 1, "could not determine a constructor"),
        ("metadata:", "metadata: " + "[" * 1000 + "]" * 1000 + "\nother:", 1, "not YAML"),
    ],
    ids=["kind", "alias", "cut", "twice", "default", "rule", "severity", "table", "code", "deep"],
)
def test_a_bad_skill(
    ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path, old: str, new: str, code: int, problem: str
) -> None:
    skill.write_text(SKILL.replace(old, new, 1))
    found, out, err = ctl("diagnose", "--skill", str(skill))
    assert (found, out) == (code, "")
    assert problem in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set", "least"), "is not NAME=VALUE"),
        (("--set", "least=x"), "x is not a value of the parameter least"),
        (("--set", "other=1"), "has no parameter other"),
        (("--history",), "exclude each other"),
    ],
)
def test_wrong_options(
    ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path, words: tuple[str, ...], problem: str
) -> None:
    code, _, err = ctl("diagnose", "--skill", str(skill), *words)
    assert code == 2
    assert problem in err


def test_a_file_that_is_too_large_or_gone(ctl: Run, pair: tuple[FakeNode, FakeNode], skill: Path) -> None:
    skill.write_bytes(b"a" * (300 << 10))
    assert "more than 256 KiB" in ctl("diagnose", "--skill", str(skill))[2]
    assert ctl("diagnose", "--skill", "/nowhere/steps.yaml")[0] == 2
    assert ctl("diagnose", "--set", "a=b")[0] == 2
