"""An ordinary user attacks the daemon with processes, files and calls: a job loses no row, and Status is answered.

``make attacks`` runs the long form of each.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from attack_scene import MEMBER, STRANGER, as_user, attacker, beside, under_way
from crowd_clients import Doors, crowd_at
from double_jobs import Job, ready
from doubles.doubles import Doubles
from e2e_support import BIN, JOBS, Daemon, remove
from elftools.elf.elffile import ELFFile
from long import LONG, long, long_unless
from ports import free_port
from waiting import until

TOKEN = "t" * 32
ENDLESS = "SELECT a.range, b.range AS r FROM range(1000000) a, range(1000000) b"
SLOW = "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000) c"
NESTED = (
    "SELECT " + "(SELECT 1 LIMIT (" * 25 + "1" + "))" * 25,
    "SELECT * FROM " + "(VALUES (" * 25 + "1" + "))" * 25,
    "SELECT " + "row(" * 60 + "1" + ")" * 60,
    "SELECT " + "(" * 900 + "1" + ")" * 900,
)


@pytest.fixture(scope="module")
def attacked(module_base: Path) -> Iterator[Daemon]:
    """One daemon for all attacks, which MEMBER may ask, and TCP whoever has the token."""
    token = module_base / "token"
    token.write_text(TOKEN)
    token.chmod(0o640)
    os.chown(token, 0, pwd.getpwnam("probing-service").pw_gid)
    listen, ras = f"127.0.0.1:{free_port()}", str(free_port())
    daemon = Daemon(
        module_base,
        "n1",
        "--users.group",
        str(MEMBER),
        "--listen",
        listen,
        "--token-file",
        str(token),
        "--nccl.ras-port",
        ras,
        "--nccl.ras-interval-s",
        "1",
    )
    daemon.start()
    yield daemon
    remove(daemon)


@pytest.fixture
def job(attacked: Daemon, start_job: Callable[[], Job]) -> Job:
    made = start_job()
    ready(attacked, made)
    return made


@pytest.fixture
def folder(base: Path) -> Path:
    """Where STRANGER may write."""
    path = base / "theirs"
    path.mkdir()
    os.chown(path, STRANGER, STRANGER)
    return path


def value_of(daemon: Daemon, option: str) -> str:
    return daemon.extra[daemon.extra.index(option) + 1]


def ended(*words: str | Path) -> str:
    with attacker(*words) as process:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
    return output


@pytest.mark.timeout(400)
def test_tiny_processes(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with beside(attacked, job):
        ended("tiny", doubles.job, folder, "2000" if LONG else "240")


@long
@pytest.mark.timeout(400)
def test_forks(attacked: Daemon, job: Job) -> None:
    with beside(attacked, job):
        ended("forks", "20000" if LONG else "2000")


@long
@pytest.mark.timeout(400)
def test_names_of_libraries(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with beside(attacked, job) as scene, under_way("names", doubles.nccl, folder, "400"):
        scene.last()
        assert attacked.json("status")["state"] in ("running", "degraded")


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["many_symbols", "many_names", "many_tables"])
def test_endless_libraries(attacked: Daemon, job: Job, folder: Path, kind: str) -> None:
    with beside(attacked, job) as scene, under_way("elf", kind, folder):
        scene.last()


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["repeated_values", "many_groups"])
def test_endless_dumps(attacked: Daemon, job: Job, doubles: Doubles, folder: Path, kind: str) -> None:
    with beside(attacked, job) as scene, under_way("dump", kind, doubles.nccl, folder):
        scene.last()


@long
@pytest.mark.timeout(400)
def test_a_loop_of_mappings(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with beside(attacked, job) as scene, under_way("mappings", doubles.nccl, folder):
        scene.last()


@long
@pytest.mark.timeout(400)
def test_a_flood_of_calls(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with beside(attacked, job):
        ended("calls", doubles.job, doubles.nccl, folder, "3000000" if LONG else "300000")


@long
@pytest.mark.timeout(400)
def test_thousands_of_threads(attacked: Daemon, job: Job) -> None:
    with beside(attacked, job) as scene, under_way("threads", "5000") as process:
        scene.last()
        attacked.ctl("stacks", str(process.pid), check=None)


@long
@pytest.mark.timeout(400)
def test_stopped_trainers(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with beside(attacked, job) as scene, under_way("stopped", doubles.job, folder, "20"):
        scene.last()
        attacked.ctl("stacks", check=None)


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["fifo", "loop", "device"])
def test_no_library_in_its_place(attacked: Daemon, job: Job, doubles: Doubles, folder: Path, kind: str) -> None:
    with beside(attacked, job) as scene, under_way("place", kind, doubles.nccl, folder):
        scene.last()


@long
@pytest.mark.timeout(400)
def test_false_debug_information(attacked: Daemon, job: Job, doubles: Doubles, folder: Path) -> None:
    with doubles.nccl.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".debug_info")
        start, size = section["sh_offset"], section["sh_size"]
    with beside(attacked, job) as scene, under_way("dwarf", doubles.nccl, folder, str(start), str(size)):
        scene.last()


@long
@pytest.mark.timeout(400)
def test_a_port_that_sends_for_ever(attacked: Daemon, job: Job, doubles: Doubles) -> None:
    with beside(attacked, job) as scene, under_way("ras", doubles.nccl, value_of(attacked, "--nccl.ras-port")):
        scene.last()


@long
@pytest.mark.timeout(400)
def test_targets_that_block_their_reader(attacked: Daemon, job: Job, tmp_path: Path) -> None:
    """Of root: an ordinary user's userfaultfd does not hold the kernel up."""
    command = [sys.executable, JOBS / "hard_to_read.py", "userfault"]
    ranks = {"WORLD_SIZE": "23", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with beside(attacked, job) as scene, ExitStack() as stack:
        for rank in range(60 if LONG else 23):
            flag = tmp_path / f"flag{rank}"
            process = subprocess.Popen([*command, flag], env={**os.environ, **ranks, "RANK": str(rank)})
            stack.callback(process.wait)
            stack.callback(process.kill)
            until(flag.exists, what="a target that blocks")
        scene.last()
        attacked.ctl("stacks", check=None)


def test_what_is_the_daemons_own(attacked: Daemon) -> None:
    assert ended("lock", attacked.socket).splitlines() == ["Permission denied"] * 3


@long
@pytest.mark.timeout(400)
def test_streams_that_are_not_read(attacked: Daemon, job: Job) -> None:
    words = [*as_user(MEMBER), BIN / "probingctl", "-t", attacked.target, "query", ENDLESS, "-f", "csv"]
    with beside(attacked, job) as scene, ExitStack() as stack:
        env = {"HOME": "/", "PATH": os.environ["PATH"]}
        for _ in range(8):
            process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/", env=env)
            stack.enter_context(process)
            stack.callback(process.kill)
        scene.last()
        assert attacked.rows("SELECT 23 AS n FROM comm.ops LIMIT 1") == [{"n": 23}]


@long
@pytest.mark.timeout(400)
def test_open_queries(attacked: Daemon, job: Job) -> None:
    with beside(attacked, job) as scene, under_way("many_queries.py", attacked.target, "64", SLOW, user=MEMBER):
        scene.last()
        assert attacked.rows("SELECT 23 AS n FROM comm.ops LIMIT 1") == [{"n": 23}]


@long
@pytest.mark.timeout(400)
def test_a_crowd_of_clients(attacked: Daemon, job: Job) -> None:
    doors = Doors(value_of(attacked, "--listen"), attacked.target, TOKEN, MEMBER)
    size = 2 if LONG else 1
    with beside(attacked, job):
        found = crowd_at(doors, 60 if LONG else 5, asking=size + LONG, idle=size)
    assert (found.failed, found.starved) == ([], 0)
    assert found.seconds


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_calls_without_a_message(attacked: Daemon, job: Job, where: str) -> None:
    address, user = (value_of(attacked, "--listen"), STRANGER) if where == "tcp" else (attacked.target, MEMBER)
    flood = ("http2_flood.py", address, "24", "64", "/probing.v1.Node/Query")
    with beside(attacked, job) as scene, under_way(*flood, user=user):
        scene.last()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "sql",
    [long_unless(number == 0, sql) for number, sql in enumerate(NESTED)],
    ids=["limit", "values", "row", "brackets"],
)
def test_nested_queries(attacked: Daemon, job: Job, sql: str) -> None:
    with beside(attacked, job) as scene, under_way("many_queries.py", attacked.target, "16", sql, user=MEMBER):
        scene.last()
        assert attacked.rows("SELECT 23 AS n FROM comm.ops LIMIT 1") == [{"n": 23}]
