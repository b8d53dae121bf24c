"""The page before a real daemon with a real job: what it shows is what the job does, and what a token allows."""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from e2e_support import BIN, Daemon
from ports import free_port
from waiting import until
from web_scene import Page

READ, JOB = "read-0123456789abcdef", "team-0123456789abcdef"


@contextmanager
def served(*arguments: str) -> Iterator[tuple[Page, str]]:
    """Runs `probingctl web`; yields the page and the key that it printed, or an empty one."""
    with subprocess.Popen([str(BIN / "probingctl"), *arguments], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            line = made.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/(?:\?key=(\S+))?", line)
            assert found is not None, line
            yield Page(int(found[1])), found[2] or ""
            made.send_signal(signal.SIGINT)
            assert made.wait(30) == 0
        finally:
            made.kill()


def test_the_page_shows_the_job_and_its_ranks(daemon: Daemon, training: str) -> None:
    with served("-t", daemon.target, "web", "--port", "0") as (page, key):
        page.enter(key)
        with page.events("/api/live/jobs") as events:
            jobs = (job for _, seen in events for job in seen["jobs"])
            shown = next(job for job in jobs if job["job"] == training and job["ranks"] == 2)
        assert shown["finding"] is None
        with page.events(f"/api/live/job?job={training}") as events:
            seen = (ranks_of(seen["ranks"]) for _, seen in events)
            ranks = next(ranks for ranks in seen if len(ranks) == 2 and all(row["python"] for row in ranks.values()))
        assert sorted(ranks) == [0, 1]
        assert page.ask(f"/api/diagnose?job={training}").data["severity"] is None
        stacks = page.ask(f"/api/stacks?job={training}&merge=1").data
        assert [tree["ranks"] for tree in stacks] == [[0, 1]]
        one = ranks[1]
        rank = page.ask(f"/api/rank?job={training}&node={one['node']}&pid={one['pid']}").data
        assert rank["process"]["rank"] == 1
        assert rank["ops"]
        until(lambda: page.ask(f"/api/profile?job={training}&wall=1&by=rank").data.get("children"), what="samples")


def ranks_of(table: dict[str, Any]) -> dict[int, dict[str, Any]]:
    rows = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    return {row["rank"]: row for row in rows}


def test_sql_and_the_timeline_agree_with_the_store(daemon: Daemon, training: str) -> None:
    with served("-t", daemon.target, "web", "--port", "0") as (page, key):
        page.enter(key)
        until(lambda: page.ask("/api/query", counting(training)).data["rows"][0][0] > 100)
        # Rows of the last seconds may still be in a ring.
        end = (datetime.now(timezone.utc) - timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = page.ask(f"/api/timeline?job={training}&from=1h&to={end}")
        (size,) = struct.unpack("<I", answer.body[8:12])
        header = json.loads(answer.body[12 : 12 + size])
        until_then = f"{counting(training)['sql']} AND ts < TIMESTAMP '{end.rstrip('Z')}'"
        counted = page.ask("/api/query", {"sql": until_then}).data["rows"][0][0]
        assert header["sections"]["ops"]["rows"] == counted


def counting(job: str) -> dict[str, str]:
    return {"sql": f"SELECT count(*) FROM comm.ops WHERE job = '{job}' AND ts > now() - INTERVAL 1 HOUR"}


def test_a_team_sees_what_its_tokens_allow_and_the_audit_log_has_their_names(
    make_daemon: Callable[..., Daemon], base: Path
) -> None:
    port = free_port()
    tokens = base / "tokens"
    text = f'[[token]]\nname = "reader"\nscope = "read"\nvalue = "{READ}"\n'
    tokens.write_text(text + f'[[token]]\nname = "team"\njobs = ["another"]\nvalue = "{JOB}"\n')
    tokens.chmod(0o600)
    shutil.chown(tokens, "probing-service")
    daemon = make_daemon("n1", "--listen", f"127.0.0.1:{port}", "--token-file", str(tokens)).start()
    listening = f"127.0.0.1:{free_port()}"
    argv = [str(BIN / "probingctl"), "-t", f"127.0.0.1:{port}", "web", "--all-nodes", "--listen", listening]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline().startswith("serving http://127.0.0.1:")
            reader, team, nobody = (Page(int(listening.rpartition(":")[2])) for _ in range(3))
            assert nobody.log_in("nobody-0123456789abcdef").status == 401
            assert reader.log_in(READ).status == 200
            assert team.log_in(JOB).status == 200
            assert reader.ask("/api/status").data[0]["sources"]
            refused = team.ask("/api/query", {"sql": "SELECT * FROM gpu.utilization", "all_nodes": False})
            assert refused.status == 400
            assert "limited to jobs" in refused.json["error"]
            with team.events("/api/live/jobs") as events:
                _, shown = next(events)
            assert (shown["jobs"], shown["contract"]["answered"]) == ([], 1)
            log = until(lambda: said if "(reader)" in (said := daemon.tail()) else "", what=daemon.tail)
            assert READ not in log
        finally:
            made.kill()


def test_a_finding_as_a_file(daemon: Daemon, training: str, tmp_path: Path) -> None:
    done = daemon.ctl("diagnose", "--job", training, "-o", str(tmp_path / "finding.html"))
    assert done.stdout == ""
    page = (tmp_path / "finding.html").read_text()
    assert training in page
    assert "<script" not in page
