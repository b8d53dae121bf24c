"""The image of `make image` as the pod of the rendered DaemonSet, beside a real job of the host: `make image-test`."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from ssl import create_default_context
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from pod_bundle import Bundle, Image
from ports import free_port
from process_tree import arguments, family
from waiting import until

from probing.daemon.supervisor.rights import COLLECTOR, READER, permitted

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "packaging" / "helm" / "generate.py"))
BUILDAH = ("buildah", "--root", "{0}/root", "--runroot", "{0}/run")
# Of packaging/container/install.sh.
USERS = {"probing": 60770, "probing-service": 60771, "probing-worker": 60772}
LIMIT_BYTES = 6 << 30
NEEDED = (*COLLECTOR, "SETUID", "SETGID", "SETPCAP", "CHOWN", "FOWNER", "DAC_OVERRIDE", "KILL")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image as it comes out of the archive."""
    (archive,) = (ROOT / ".build" / "image").glob("probingd-*.oci.tar")
    storage = tmp_path_factory.mktemp("containers")

    def buildah(*words: str) -> str:
        start = [word.format(storage) for word in BUILDAH]
        return subprocess.run([*start, *words], check=True, capture_output=True, text=True).stdout.strip()

    try:
        container = buildah("from", "--quiet", f"oci-archive:{archive}")
        config = json.loads(buildah("inspect", "--type", "container", container))["OCIv1"]["config"]
        environment = (*config["Env"], "HOSTNAME=pod")
        yield Image(Path(buildah("mount", container)), tuple(config["Entrypoint"]), environment)
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the host with a memory limit."""
    base = Path("/sys/fs/cgroup/memory")
    path = (base if base.is_dir() else base.parent) / f"probingd-job-{os.getpid()}"
    path.mkdir()
    (path / ("memory.limit_in_bytes" if base.is_dir() else "memory.max")).write_text(f"{LIMIT_BYTES}\n")
    yield path
    # Once all that ran in it has ended.
    until(lambda: not (path / "cgroup.procs").read_text(), what="the end of the job")
    path.rmdir()


@pytest.fixture
def job(tmp_path: Path, group: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks of torch on the host, outside of any container, in ``group``."""
    words = [f"{sys.prefix}/bin/torchrun", "--nproc-per-node=2", f"--master-port={free_port()}"]
    program = [str(ROOT / "examples" / "train_ddp.py"), "--steps=1000000", "--delay-ms=20"]
    with (tmp_path / "job.log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        in_group = ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
        process = subprocess.Popen([*in_group, *words, *program], env=environment, stdout=log, stderr=log)
    try:
        until(lambda: "step" in (tmp_path / "job.log").read_text(), 60, what="the first step")
        yield process
    finally:
        for pid in reversed(family(process.pid)):
            os.kill(pid, 9)
        process.wait()


class Pod:
    """The pod of the chart with ``values``, on a node that is this machine."""

    def __init__(self, base: Path, image: Image, **values: Any) -> None:
        self.instance = f"image-{os.getpid()}"
        self.state = base / "state"
        config = {"config": {"instance": self.instance}, "state": {"hostPath": str(self.state)}}
        text = MADE["manifest"]({**values, **config})
        self.objects = [each for each in yaml.safe_load_all(text) if each]
        (daemon_set,) = [each for each in self.objects if each["kind"] == "DaemonSet"]
        self.spec = daemon_set["spec"]["template"]["spec"]
        self.container = self.spec["containers"][0]
        self.image = image
        self.bundle = Bundle(f"probingd-{uuid.uuid4().hex[:8]}", base / "bundle")

    def start(self) -> Pod:
        self.bundle.start(self.spec, self.objects, self.image, "gn6")
        until(lambda: "ready\n" in self.bundle.text("out") or self.ended(), 60, what="ready")
        assert not self.ended(), self.bundle.text("err")
        return self

    def ended(self) -> bool:
        assert self.bundle.process is not None
        return self.bundle.process.poll() is not None

    def end(self) -> int:
        return self.bundle.end(self.spec["terminationGracePeriodSeconds"])

    def json(self, *words: str) -> Any:
        done = self.bundle.run("probingctl", "-f", "json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def pids(self) -> dict[str, int]:
        """The pid of a process of each kind, by its module."""
        state = json.loads(subprocess.run(["runc", "state", self.bundle.name], capture_output=True, check=True).stdout)
        found = {"supervisor": int(state["pid"])}
        for pid in family(int(state["pid"])):
            words = arguments(pid)
            if "-m" in words:
                found[words[words.index("-m") + 1].removeprefix("probing.daemon.")] = pid
        return found


@pytest.fixture
def make_pod(tmp_path: Path, image: Image) -> Iterator[Callable[..., Pod]]:
    made: list[Pod] = []

    def make(**values: Any) -> Pod:
        made.append(Pod(tmp_path / "node", image, **values))
        return made[-1]

    (tmp_path / "node").mkdir()
    yield make
    for pod in made:
        if pod.bundle.process is not None and not pod.ended():
            pod.end()
    subprocess.run([f"{sys.prefix}/bin/probingd", "cleanup", "--instance", f"image-{os.getpid()}"], check=False)


def pins(pod: Pod) -> list[Path]:
    folder = Path("/sys/fs/bpf/probingd", pod.instance)
    return list(folder.rglob("*")) if folder.is_dir() else []


def uid_of(pid: int) -> int:
    return int(re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]


def test_a_pod_sees_a_job_of_the_host(make_pod: Callable[..., Pod], job: subprocess.Popen[bytes], group: Path) -> None:
    pod = make_pod().start()
    ranks = until(
        lambda: (
            (rows := [row for row in pod.json("ps") if row["pid"] in family(job.pid) and row["role"] == "trainer"])
            and {row["rank"] for row in rows} == {0, 1}
            and all("gloo" in row["backends"] for row in rows)
            and rows
        ),
        20,
        what="both ranks in ps",
    )
    assert {row["node"] for row in ranks} == {"gn6"}
    threads = pod.json("stacks", str(ranks[0]["pid"]))
    assert "train_ddp.py" in json.dumps(threads)
    # Collectives, by probes; samples, by the clock of the sampler; steps, from both.
    for table in ("comm.ops", "python.samples", "train.steps", "process.processes"):
        count = f"SELECT count(*) AS n FROM {table}"
        until(lambda count=count: pod.json("query", count)[0]["n"], 30, what=f"rows of {table}")
    limit = "SELECT cgroup, max(total_bytes) AS n FROM host.memory WHERE scope = 'cgroup' GROUP BY cgroup"
    found = {"cgroup": f"/{group.name}", "n": LIMIT_BYTES}
    until(lambda: found in pod.json("query", limit), 20, what="the limit of the job's control group")
    sources = {each["name"]: each for each in pod.json("status")["sources"]}
    assert {name for name, each in sources.items() if each["state"] not in ("running", "stopped")} == set()
    assert pod.bundle.run("probingctl", "diagnose").returncode in (0, 3)
    assert pod.bundle.run("probingd", "check").returncode == 0


def test_each_process_has_its_user_and_rights(make_pod: Callable[..., Pod], job: subprocess.Popen[bytes]) -> None:
    pod = make_pod().start()
    until(lambda: pod.json("ps"), 20, what="the job in ps")
    pod.json("query", "SELECT 1")
    wanted = {"collector", "service", "confined.reader", "confined.sql_worker"}
    pids = until(lambda: (found := pod.pids()).keys() >= wanted and found, what="all processes")
    has = {kind: (uid_of(pid), permitted(str(pid))) for kind, pid in pids.items()}
    assert has["collector"] == (USERS["probing"], frozenset(COLLECTOR))
    assert has["confined.reader"] == (USERS["probing"], frozenset(READER))
    assert has["service"] == (USERS["probing-service"], frozenset())
    assert has["confined.sql_worker"] == (USERS["probing-worker"], frozenset())
    assert {uid for uid, _ in has.values()} == {0, *USERS.values()}
    assert pod.bundle.run("touch", "/etc/new").returncode != 0


def test_probes_of_the_kubelet_follow_the_daemon(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod().start()
    checks = {name: pod.container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    for check in checks.values():
        done = pod.bundle.run(*check["exec"]["command"], seconds=check["timeoutSeconds"])
        assert done.returncode == 0, done.stderr
    (words,) = {tuple(check["exec"]["command"]) for check in checks.values()}
    collector = pod.pids()["collector"]
    os.kill(collector, 19)
    assert pod.bundle.run(*words, seconds=checks["livenessProbe"]["timeoutSeconds"]).returncode != 0
    os.kill(collector, 18)
    assert pod.bundle.run(*words).returncode == 0


@pytest.fixture
def secrets(tmp_path: Path) -> list[dict[str, Any]]:
    """The Secrets of a cluster: a token, and the certificate of this node by an authority of nodes."""
    folder = tmp_path / "ca"
    for words in (("ca", "nodes"), ("node", "nodes", "gn6", "127.0.0.1,localhost")):
        subprocess.run([ROOT / "packaging" / "test-ca.sh", folder, *words], check=True)
    files = {"tls.crt": "gn6.pem", "tls.key": "gn6.key", "ca.crt": "nodes.pem"}
    (tmp_path / "token").write_text(uuid.uuid4().hex)
    (tmp_path / "token").chmod(0o600)
    return [
        {"kind": "Secret", "metadata": {"name": name}, "stringData": data}
        for name, data in (
            ("tokens", {"token": (tmp_path / "token").read_text()}),
            ("nodes", {name: (folder / file).read_text() for name, file in files.items()}),
        )
    ]


def test_a_pod_that_listens_reads_its_secrets(
    make_pod: Callable[..., Pod], secrets: list[dict[str, Any]], tmp_path: Path
) -> None:
    listen, http = free_port(), free_port()
    pod = make_pod(
        listen={"enabled": True, "port": listen},
        metrics={"enabled": True, "port": http},
        token={"secretName": "tokens"},
        tls={"secretName": "nodes"},
    )
    pod.objects += secrets
    pod.start()
    authority = str(tmp_path / "ca" / "nodes.pem")
    words = [f"{sys.prefix}/bin/probingctl", "-t", f"127.0.0.1:{listen}", "--tls-ca", authority]
    with_token = [*words, "--token-file", str(tmp_path / "token"), "-f", "json", "nodes"]
    answered = subprocess.run(with_token, capture_output=True, check=True)
    assert [row["node"] for row in json.loads(answered.stdout)] == ["gn6"]
    assert subprocess.run([*words, "ps"], capture_output=True, check=False).returncode == 1
    with urlopen(f"https://127.0.0.1:{http}/healthz", context=create_default_context(cafile=authority)) as answer:
        assert answer.read().strip() in (b"running", b"degraded")


def test_the_end_of_a_pod_leaves_rows_alone(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod().start()
    assert pins(pod)
    assert pod.end() == 0
    assert pins(pod) == []
    assert (pod.state / "manifest").exists()


def test_the_next_pod_reads_what_the_probes_saw_meanwhile(
    make_pod: Callable[..., Pod], job: subprocess.Popen[bytes]
) -> None:
    first = make_pod(keepProbes=True).start()
    counted = "SELECT count(*) AS n FROM comm.ops"
    until(lambda: first.json("query", counted)[0]["n"] > 50, 30, what="operations")
    hook = first.bundle.run(*first.container["lifecycle"]["preStop"]["exec"]["command"])
    # The runtime kills what still runs in a container that has ended.
    assert hook.returncode in (0, 128 + 9), hook.stderr
    assert first.bundle.wait(30) == 0
    assert pins(first)
    second = make_pod(keepProbes=True).start()
    gaps = (
        "SELECT count(*) AS n, max(seq) - min(seq) + 1 - count(DISTINCT seq) AS missing FROM comm.ops "
        "WHERE op = 'all_reduce' GROUP BY job, run, comm, rank"
    )
    until(lambda: min(row["n"] for row in second.json("query", gaps)) > 300, 60, what="operations of both pods")
    assert {row["missing"] for row in second.json("query", gaps)} == {0}


def test_a_wrong_configuration_ends_the_pod_with_a_line(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod()
    (file,) = [each for each in pod.objects if each["kind"] == "ConfigMap"]
    file["data"]["probingd.toml"] = "[store]\nmax_byte = 1\n"
    pod.bundle.start(pod.spec, pod.objects, pod.image, "gn6")
    assert pod.bundle.wait(30) == 2
    lines = pod.bundle.text("err").splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert "max_byte" in lines[0]


def test_the_container_adds_exactly_what_is_needed(make_pod: Callable[..., Pod]) -> None:
    assert set(make_pod().container["securityContext"]["capabilities"]["add"]) == set(NEEDED)


@pytest.mark.parametrize("left_out", NEEDED)
def test_the_daemon_needs_each_capability(make_pod: Callable[..., Pod], left_out: str) -> None:
    pod = make_pod()
    pod.container["securityContext"]["capabilities"]["add"].remove(left_out)
    pod.bundle.start(pod.spec, pod.objects, pod.image, "gn6")
    until(lambda: "ready\n" in pod.bundle.text("out") or pod.ended(), 60, what="ready, or the end")
    if not pod.ended():
        # It starts, and runs all processes as one user, or cannot end in order.
        code = pod.end()
        assert code != 0 or "cannot change the user" in pod.bundle.text("err")
