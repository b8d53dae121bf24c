"""A bug report of a real daemon beside a real trainer: whatever names both have, no byte of the archive has them."""

from __future__ import annotations

import gzip
import json
import os
import pwd
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import BIN, Daemon
from ports import free_port
from waiting import until

CANARY = "kanarien7q3x"
# It imports torch so that it is taken for a trainer, and writes a line that is stored whenever it is asked to.
JOB = f"""
import sys
import torch
{CANARY}_variable = 1
print("ready", flush=True)
for _ in sys.stdin:
    print("RuntimeError: {CANARY} failed", file=sys.stderr, flush=True)
"""
HOST = ("unshare", "--uts", "--", "sh", "-c", f'hostname {CANARY}host; exec "$@"', "sh")


def daemon_of(make_daemon: Callable[..., Daemon], base: Path) -> Daemon:
    """A daemon on a host, and with a configuration, that have the canary in every text."""
    home = base / CANARY
    home.mkdir(mode=0o755)
    token = home / "token"
    token.write_text(f"{CANARY}-token-of-sixteen-and-more\n")
    token.chmod(0o640)
    os.chown(token, 0, pwd.getpwnam("probing-service").pw_gid)
    daemon = make_daemon(
        f"{CANARY}-n1",
        f"--token-file={token}",
        f"--listen=127.0.0.1:{free_port()}",
        f"--cluster.labels=rack={CANARY}",
        "--logs.enabled",
        f"--variables.watch={CANARY}_variable",
        f"--diagnose.webhook=http://127.0.0.1:9/{CANARY}",
        f"--query.views-dir={home}",
        f"--probes.user-dir={home}",
    )
    # The source of users' probes is then degraded, with this path as reason.
    (home / f"{CANARY}.toml").write_text(f'{CANARY} = "{CANARY}"')
    daemon.before = HOST
    return daemon.start()


def trainer(run_job: Callable[..., subprocess.Popen[Any]], folder: Path) -> subprocess.Popen[Any]:
    folder.mkdir()
    script = folder / f"{CANARY}_train.py"
    script.write_text(JOB)
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29871",
        "TORCHELASTIC_RUN_ID": f"{CANARY} job",
        "HF_TOKEN": f"hf_{CANARY}",
        "USER": CANARY,
    }
    job = run_job(
        sys.executable,
        script,
        f"--data=/data/{CANARY}",
        f"--password={CANARY}",
        env=env,
        cwd=folder,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def test_no_name_is_in_the_archive(
    make_daemon: Callable[..., Daemon], base: Path, tmp_path: Path, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    daemon = daemon_of(make_daemon, base)
    job = trainer(run_job, tmp_path / CANARY)
    rows = until(lambda: [r for r in daemon.json("ps") if r["job"] == f"{CANARY} job"], what="the job")
    assert job.stdin is not None

    def stored() -> list[dict[str, Any]]:
        job.stdin.write("\n")
        job.stdin.flush()
        return daemon.rows("SELECT line FROM process.logs")

    # GIVEN that each place that the report could take it from has the canary
    proc = Path(f"/proc/{job.pid}")
    unredacted = {
        "command line": (proc / "cmdline").read_text(),
        "environment": (proc / "environ").read_text(),
        "directory": str((proc / "cwd").readlink()),
        "row of the process": rows[0]["command"],
        "node": rows[0]["node"],
        "configuration": str(daemon.rows("SELECT value FROM probing.config WHERE key = 'token_file'")),
        "settings": str(daemon.rows("SELECT value FROM probing.settings WHERE key = 'variables.watch'")),
        "sources": str([s["reason"] for s in daemon.json("status")["sources"] if s["state"] == "degraded"]),
        "log": daemon.log.read_text(),
        "lines": str(until(stored, what="a line of the trainer")),
        "members": str(daemon.rows("SELECT member, labels FROM cluster.members")),
    }
    assert [place for place, text in unredacted.items() if CANARY not in text] == []
    # WHEN an admin asks for a report
    words = [
        *HOST,
        str(BIN / "probingctl"),
        "bugreport",
        "-t",
        daemon.target,
        "--log",
        str(daemon.log),
        "-f",
        "json",
        "--names",
        str(tmp_path / "names.json"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # THEN no part is missing
    assert [(one["name"], one["problem"]) for one in report["contents"] if one["problem"]] == []
    path = tmp_path / report["file"]
    assert path.name.startswith(f"probingd-bugreport-{CANARY}-n1-")
    assert path.stat().st_mode & 0o777 == 0o600
    # AND the canary is in no byte of it, compressed, unpacked or as a name
    assert CANARY.encode() not in path.read_bytes()
    with tarfile.open(path) as archive:
        members = {entry.name: entry for entry in archive.getmembers()}
        texts = {name: archive.extractfile(entry).read().decode() for name, entry in members.items()}
    assert {(entry.uid, entry.gid, entry.uname, entry.gname) for entry in members.values()} == {(0, 0, "", "")}
    assert [name for name, text in texts.items() if CANARY in name + text] == []
    assert CANARY.encode() not in gzip.decompress(path.read_bytes())
    assert texts.keys() == {one["name"] for one in report["contents"]}
    # AND it still says what somebody needs who looks for a fault
    of = {name.rpartition("/")[2]: text for name, text in texts.items()}
    config = {row["key"]: row for row in json.loads(of["config.json"])}
    assert config["logs.enabled"] == {"key": "logs.enabled", "value": "true", "changed": True}
    assert config["token_file"]["value"].startswith("path-")
    assert config["diagnose.webhook"]["value"] == "(set)"
    assert {row["name"] for row in json.loads(of["versions.json"])} >= {"probingd", "kernel", "libbpf", "distribution"}
    assert {check["name"] for check in json.loads(of["check.json"])} >= {"kernel", "btf", "libbpf"}
    degraded = [s for s in json.loads(of["status.json"])["sources"] if s["state"] == "degraded"]
    assert degraded
    assert "INFO" in of["log.txt"] or "WARNING" in of["log.txt"]
    names = json.loads((tmp_path / "names.json").read_text())
    # The same name is the same token everywhere.
    node = json.loads(of["status.json"])["node"]
    assert names[node] == f"{CANARY}-n1"
    assert {row["member"] for row in json.loads(of["members.json"])} == {node}
    assert f"{CANARY} job" in names.values()
    assert f"{CANARY}host" in names.values()


def test_a_report_is_made_where_no_daemon_answers(tmp_path: Path) -> None:
    words = [str(BIN / "probingctl"), "bugreport", "-t", f"unix:{tmp_path}/none.sock", "-o", "r.tar.gz", "--all-nodes"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "r.tar.gz") as archive:
        texts = {e.name.rpartition("/")[2]: archive.extractfile(e).read().decode() for e in archive.getmembers()}
    assert "missing" in texts["status.json"]
    assert "missing" in texts["losses.json"]
    assert {check["name"] for check in json.loads(texts["check.json"])} >= {"kernel"}
