"""Bug reports of two nodes whose every text is a name, of nodes that do not answer, and what is left on the disk."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from client_fake_node import FakeNode

from probing.api.errors import QueryTimeout
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables import TABLES
from probing.client.bugreport.questions import NAMES, QUESTIONS
from probing.client.bugreport.redaction import vocabulary
from probing.client.commands import bugreport
from probing.daemon.query.gate import check
from probing.diagnosis.preflight.facts import NodeFacts, Version

Run = Callable[..., tuple[int, str, str]]
CANARY = "kanarien7q3x"
READ = (
    "comm.ras",
    "cluster.members",
    "diagnosis.findings",
    "gpu.devices",
    "probing.config",
    "probing.cost",
    "probing.losses",
    "probing.settings",
    "probing.store",
    "probing.versions",
    "process.events",
    "process.processes",
)
# What the daemon says of itself, in words that no job or user can choose.
PLAIN = {
    ("probing.versions", "name"),
    ("probing.versions", "version"),
    ("gpu.devices", "name"),
    ("probing.config", "key"),
    ("probing.config", "default"),
    ("probing.settings", "key"),
}


def value_of(table: str, column: str, kind: pa.DataType, now: int) -> Any:
    if (table, column) in PLAIN:
        return f"{column} of ours"
    if table == "diagnosis.findings" and column in ("evidence", "missing"):
        return json.dumps([f"rank 3 waits for {CANARY}", CANARY])
    if pa.types.is_string(kind):
        return f"{CANARY}_{column}" if column.endswith("s") else f"a {CANARY} in the {column}, user@{CANARY}/x"
    if pa.types.is_boolean(kind):
        return True
    return now if pa.types.is_timestamp(kind) else 7


def everything(node: str) -> dict[str, list[dict[str, Any]]]:
    """A row of each table that is read; each text of it has the canary."""
    now = time.time_ns()
    return {
        name: [{field.name: value_of(name, field.name, field.type, now) for field in TABLES[name].logical}]
        for name in READ
    }


class Named(FakeNode):
    """Its state and its sources have the canary as well."""

    boot_id = "another"

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        text = f"cannot read /home/{CANARY}/x of {CANARY}"
        source = pb.Source(name=f"user.{CANARY}", state="degraded", reason=text, detail=text, rows=7)
        return pb.StatusReply(
            node=self.name,
            version="0.1.0",
            instance=CANARY,
            boot_id=self.boot_id,
            engine=self.engine,
            state="degraded",
            reason=text,
            sources=[source],
        )


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Named, Named]]:
    nodes = tuple(Named(tmp_path, f"{CANARY}{n}", everything(f"{CANARY}{n}")) for n in (1, 2))
    peers = [pb.Peer(node=node.name, address=node.address, state="healthy") for node in nodes]
    for node in nodes:
        node.peers = peers
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    monkeypatch.chdir(tmp_path)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.stop()


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read().decode() for entry in archive.getmembers()}


def test_nodes_take_every_question() -> None:
    for question in (*NAMES, *QUESTIONS):
        assert check(question.sql, time.time_ns()).tables


def test_no_text_of_any_row_reaches_the_report(named: tuple[Named, Named], ctl: Run, tmp_path: Path) -> None:
    # GIVEN that what is read of the nodes has the canary in every text, and that it is no word of ours
    assert CANARY not in vocabulary()
    sources = "".join(question.source for question in (*NAMES, *QUESTIONS))
    assert {name for name in TABLES if name in sources} == set(READ)
    code, rows, _ = ctl("query", "SELECT * FROM diagnosis.findings", "-f", "json")
    assert (code, rows.count(CANARY) > 10) == (0, True)
    # WHEN a report is made of both
    code, out, err = ctl("bugreport", "--all-nodes", "-o", "r.tar.gz", "-f", "json")
    assert (code, err) == (0, "")
    # THEN no file of it has the canary, and each question has its row
    texts = unpacked(tmp_path / "r.tar.gz")
    assert [name for name, text in texts.items() if CANARY in name + text] == []
    assert CANARY not in out.replace(str(tmp_path), "")
    for host in ("host-1", "host-2"):
        for question in QUESTIONS:
            found = json.loads(texts[f"probingd-bugreport/{host}/{question.name}.json"])
            assert len(found) == 1, question.name
    losses = json.loads(texts["probingd-bugreport/host-1/losses.json"])[0]
    assert losses["reason"].startswith("a name-")
    assert (losses["count"], losses["pid"]) == (7, 7)
    finding = json.loads(texts["probingd-bugreport/host-1/findings.json"])[0]
    assert finding["evidence"][0].startswith("rank 3 waits for name-")
    assert finding["job"].startswith("job-")
    assert finding["job"] == json.loads(texts["probingd-bugreport/host-2/findings.json"])[0]["job"]
    # AND parts that only the machine itself has say where to ask
    assert "another machine" in texts["probingd-bugreport/host-1/check.json"]
    assert "journalctl" in texts["probingd-bugreport/host-2/log.txt"]
    assert (tmp_path / "r.tar.gz").stat().st_mode & 0o777 == 0o600


def test_a_part_that_fails_is_a_file_that_says_why(named: tuple[Named, Named], ctl: Run, tmp_path: Path) -> None:
    named[0].preflight = NodeFacts(named[0].name, versions=(Version("torch", "2.9.1+cu128"), Version("nccl", CANARY)))
    named[0].error = QueryTimeout(f"other queries of {CANARY} kept the node busy", hint="ask again")
    log = tmp_path / "daemon.log"
    log.write_text(f"collector: INFO 7 records of {CANARY}\n")
    code, out, _ = ctl("bugreport", "-o", "r.tar.gz", "--log", str(log), "--names", "names.json", "--python", "/p")
    assert code == 0
    texts = unpacked(tmp_path / "r.tar.gz")
    losses = json.loads(texts["probingd-bugreport/host-1/losses.json"])
    assert losses["missing"].startswith("other queries of name-")
    assert losses["hint"] == "ask again"
    assert CANARY not in "".join(texts.values())
    interpreter = json.loads(texts["probingd-bugreport/host-1/interpreter.json"])
    assert (interpreter["torch"], interpreter["nccl"][:5]) == ("2.9.1+cu128", "name-")
    # The list on the terminal says the same, and what was replaced.
    assert "missing: other queries of name-" in out
    assert "replaced by tokens" in out
    # A log that somebody names is taken for the only node, wherever it runs.
    assert texts["probingd-bugreport/host-1/log.txt"].startswith("collector: INFO 7 records of name-")
    names = json.loads((tmp_path / "names.json").read_text())
    assert names["host-1"] == named[0].name
    assert (tmp_path / "names.json").stat().st_mode & 0o777 == 0o600
    code, _, err = ctl("bugreport", "-o", "r.tar.gz", "--strict")
    assert code == 4
    assert "parts of the report are missing" in err


def test_a_report_has_a_bounded_number_of_nodes(
    named: tuple[Named, Named], ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bugreport, "MAX_NODES", 1)
    code, _, err = ctl("bugreport", "--all-nodes", "-o", "r.tar.gz")
    assert (code, "the report has 1 of 2 nodes" in err) == (0, True)
    assert not [name for name in unpacked(tmp_path / "r.tar.gz") if "host-2" in name]


def test_a_node_that_failed_has_a_part_that_says_so(named: tuple[Named, Named], ctl: Run, tmp_path: Path) -> None:
    # GIVEN that the target knows a node which has failed
    named[0].peers[1].state = "failed"
    code, _, err = ctl("bugreport", "--all-nodes", "-o", "r.tar.gz")
    assert (code, "is missing" in err) == (0, True)
    texts = unpacked(tmp_path / "r.tar.gz")
    assert "failed" in json.loads(texts["probingd-bugreport/host-2/losses.json"])["missing"]
    assert CANARY not in "".join(texts.values())


def test_a_node_that_is_silent_keeps_no_report_back(named: tuple[Named, Named], ctl: Run, tmp_path: Path) -> None:
    named[1].stop()
    code, _, _ = ctl("bugreport", "--nodes", f"{named[0].address},{named[1].address}", "-o", "r.tar.gz")
    assert code == 0
    texts = unpacked(tmp_path / "r.tar.gz")
    assert "missing" in texts["probingd-bugreport/host-2/status.json"]
    assert json.loads(texts["probingd-bugreport/host-1/store.json"])[0]["bytes"] == 7
    # The default name has how many nodes it is of.
    assert ctl("bugreport", "--all-nodes")[0] == 0
    assert [path.name.startswith("probingd-bugreport-2-nodes-") for path in tmp_path.glob("*Z.tar.gz")] == [True]
