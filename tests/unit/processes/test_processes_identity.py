"""Who a process is: job, run, ranks, container, and what of its command line may be shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Job, job_of, ranks_of, restarts_of
from probing.daemon.processes.owners import container_of
from probing.daemon.processes.redaction import command_text
from probing.daemon.processes.runs import Runs
from probing.daemon.source import ProcessKey

C = "0123456789abcdef" * 4
D = "fedcba9876543210" * 4
POD = "11111111-2222-3333-4444-555555555555"
POD_ = POD.replace("-", "_")
SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"
TORCHRUN = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
STATIC_HASH = "1" * 32


@pytest.mark.parametrize(
    ("path", "container", "pod"),
    [
        ("/", None, None),
        ("/user.slice/user-1000.slice/session-3.scope", None, None),
        (f"/docker/{C}", C, None),
        (f"/system.slice/docker-{C}.scope", C, None),
        (f"/system.slice/containerd.service/{C}", C, None),
        (f"/default/{C}", C, None),
        (f"/kubepods/burstable/pod{POD}/{C}", C, POD),
        (f"/kubepods/pod{POD}/{C}", C, POD),
        (f"/kubepods/besteffort/pod{STATIC_HASH}/{C}", C, STATIC_HASH),
        (f"{SLICE}/cri-containerd-{C}.scope", C, POD),
        (f"{SLICE}/crio-{C}.scope", C, POD),
        (f"{SLICE}/crio-{C}.scope/container", C, POD),
        (f"{SLICE}/docker-{C}.scope", C, POD),
        (f"{SLICE}", None, POD),
        (f"/system.slice/containerd.service/kubepods-burstable-pod{POD_}.slice:cri-containerd:{C}", C, POD),
        (f"/../../../kubepods/burstable/pod{POD}/{C}", C, POD),
        (f"/docker/{D}/kubelet{SLICE}/cri-containerd-{C}.scope", C, POD),
        (f"/docker/{D}/docker/{C}", C, None),
        (f"/machine.slice/libpod-{C}.scope", C, None),
        (f"/machine.slice/libpod-{C}.scope/container", C, None),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{C}.scope/container", C, None),
        (f"/libpod_parent/libpod-{C}", C, None),
        ("/lxc/web1", "web1", None),
        ("/lxc.payload.web1/init.scope", "web1", None),
        ("/lxc.payload/web1", "web1", None),
        ("/machine.slice/systemd-nspawn@build.service/payload", "build", None),
        ("/machine.slice/machine-build.scope", "build", None),
        ("/buildkit/abcdefghijklmnopqrstuvwxy", "abcdefghijklmnopqrstuvwxy", None),
        (f"/ecs/{'a' * 32}/{'a' * 32}-1234567", f"{'a' * 32}-1234567", None),
        (f"/ecs/{'a' * 32}/{C}", C, None),
        ("/slurm/uid_0/job_12/step_0/task_0", None, None),
        (f"/docker/{C}x", None, None),
    ],
)
def test_container_shapes(path: str, container: str | None, pod: str | None) -> None:
    assert container_of([path]) == (container, pod)
    assert container_of(["/", path]) == (container, pod)


@given(st.lists(st.text(max_size=200), max_size=5))
def test_no_path_breaks_containers(paths: list[str]) -> None:
    container_of(paths)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "2"}, (3, 8, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8", "NODE_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 8, None, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}, (5, 16, 1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "6"}, (5, 6, None, None)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (1, 2, 1, None),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, (1, 2, 0, None)),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, (0, 2, None, None)),
        # The tables have 32 bits for each.
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": str(1 << 31), "GROUP_RANK": "9" * 10, "NODE_RANK": "2"},
            (3, 8, None, 2),
        ),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, None),
        ({"RANK": "1\n", "WORLD_SIZE": "9" * 30}, None),
        ({"RANK": "٣", "WORLD_SIZE": "8"}, None),
        ({"RANK": "1"}, None),
        ({}, None),
    ],
)
def test_ranks(environ: dict[str, str], expected: tuple[int | None, ...] | None) -> None:
    ranks = ranks_of(environ)
    assert (ranks and (ranks.rank, ranks.world_size, ranks.local_rank, ranks.node_rank)) == expected


K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "name", "source"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", **TORCHRUN}, "77.0", "slurm"),
        ({"SLURM_JOB_ID": "77"}, "77", "slurm"),
        ({**K8S, "HOSTNAME": "bert-worker-3", **TORCHRUN}, "bert", "kubernetes"),
        ({**K8S, "HOSTNAME": "bert-large-master-0", "POD_NAMESPACE": "ml"}, "ml/bert-large", "kubernetes"),
        ({**K8S, "HOSTNAME": "bert-2-x7k2p", "JOB_COMPLETION_INDEX": "2"}, "bert", "kubernetes"),
        ({**K8S, "HOSTNAME": "bert-2", "JOB_COMPLETION_INDEX": "2"}, "bert", "kubernetes"),
        ({**K8S, "HOSTNAME": "bert-trn-1", "VC_TASK_INDEX": "1"}, "bert", "kubernetes"),
        ({**K8S, "JOBSET_NAME": "set", "HOSTNAME": "set-a-0-0-abcde"}, "set", "kubernetes"),
        ({**K8S, "HOSTNAME": "notebook", "TORCHELASTIC_RUN_ID": "abc"}, "abc", "torchelastic"),
        ({"HOSTNAME": "bert-worker-3", "TORCHELASTIC_RUN_ID": "abc"}, "abc", "torchelastic"),
        ({"RAY_JOB_ID": "01000000", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "01000000", "ray"),
        (TORCHRUN, "n1/127.0.0.1:29500", "master"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "n1/localhost:1", "master"),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "1"}, "n1/::1:1", "master"),
        ({"MASTER_ADDR": "gn6", "MASTER_PORT": "29500"}, "gn6:29500", "master"),
        ({"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}, "10.1.2.3:29500", "master"),
    ],
)
def test_job(environ: dict[str, str], name: str, source: str) -> None:
    job = job_of(environ, "n1")
    assert job is not None
    assert (job.name, job.source) == (name, source)


def test_no_job() -> None:
    assert job_of({"MASTER_ADDR": "a"}, "n1") is None
    assert job_of({}, "n1", in_pod=True) is None


@given(
    st.dictionaries(
        st.sampled_from(["SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "HOSTNAME"]), st.text()
    )
)
def test_no_environment_breaks_identity(environ: dict[str, str]) -> None:
    job = job_of(environ, "n", in_pod=True)
    assert job is None or 0 < len(job.name) <= 200
    ranks_of(environ)
    restarts_of(environ)


class TestRuns:
    def facts(self, pid: int, start: int, **environ: str) -> Facts:
        return Facts(pid, start, environ={**TORCHRUN, **environ})

    def name(self, runs: Runs, facts: Facts, launcher: tuple[int, int] | None = None, rank: int | None = None) -> str:
        job = job_of(facts.environ, "n1") or Job(f"pid:{facts.pid}", "pid")
        return runs.name(facts, job, launcher, rank, None)

    def test_a_launcher_names_the_run(self) -> None:
        runs = Runs("boot")
        first = [self.name(runs, self.facts(pid, 50), (5, 40), pid - 10) for pid in (10, 11)]
        again = [self.name(runs, self.facts(pid, 90), (6, 80), pid - 20) for pid in (20, 21)]
        assert first[0] == first[1] != again[0] == again[1]
        # Another daemon, and a restarted one, say the same; another boot does not.
        assert self.name(Runs("boot"), self.facts(11, 50), (5, 40), 1) == first[0]
        assert self.name(Runs("other"), self.facts(11, 50), (5, 40), 1) != first[0]

    def test_an_elastic_restart_is_another_run(self) -> None:
        runs = Runs("boot")
        first = self.name(runs, self.facts(10, 50), (5, 40), 0)
        second = self.name(runs, self.facts(12, 60, TORCHELASTIC_RESTART_COUNT="1"), (5, 40), 0)
        assert first.startswith("0-")
        assert second == first.replace("0-", "1-", 1)

    def test_without_a_launcher_the_oldest_names_it(self) -> None:
        runs = Runs("boot")
        first = [self.name(runs, self.facts(10 + rank, 50 + rank), None, rank) for rank in range(3)]
        assert len(set(first)) == 1
        # The same script again while a process of the first still lives: its ranks are taken, so it is another run.
        runs.ended((10, 50))
        runs.ended((11, 51))
        again = [self.name(runs, self.facts(20 + rank, 90 + rank), None, rank) for rank in range(3)]
        assert len(set(again)) == 1
        assert again[0] != first[0]
        for pid, start in ((12, 52), (20, 90), (21, 91), (22, 92)):
            runs.ended((pid, start))
        assert self.name(runs, self.facts(30, 95), None, 2) not in (first[0], again[0])

    def test_a_restarted_daemon_goes_on_with_restored_runs(self) -> None:
        runs = Runs("boot")
        facts = self.facts(10, 50)
        job = job_of(facts.environ, "n1")
        assert job is not None
        runs.restore(facts, job, 0, None, "0-abcdef")
        assert self.name(runs, self.facts(11, 60), None, 1) == "0-abcdef"

    def test_jobs_over_many_nodes_are_named_equally_everywhere(self) -> None:
        many = {"MASTER_ADDR": "gn6", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        here = self.name(Runs("a"), self.facts(10, 50, **many), (5, 40), 0)
        there = self.name(Runs("b"), self.facts(99, 77, **many), (50, 70), 8)
        assert here == there
        assert here != self.name(Runs("a"), self.facts(10, 50, **many, MASTER_PORT="3"), (5, 40), 0)

    def test_trainings_of_a_batch_script_are_runs_of_their_own(self) -> None:
        runs, script = Runs("boot"), {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}

        def name(pid: int, start: int, rank: int | None = 0) -> str:
            facts = replace(self.facts(pid, start, **script), ancestors=((5, 40, "bash"), (4, 30, "slurmstepd")))
            return self.name(runs, facts, ProcessKey(4, 30), rank)

        # Processes that run at the same time are one training, also where they inherited the same rank.
        first = [name(10, 50), name(11, 51), name(12, 52, None)]
        assert len(set(first)) == 1
        for pid in (10, 11, 12):
            runs.ended(ProcessKey(pid, 40 + pid))
        # The script goes on with another training.
        assert name(20, 90) not in first
        assert name(21, 91) == name(20, 90)

    def test_scheduler_ids_need_only_the_count(self) -> None:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}
        assert self.name(Runs("a"), self.facts(1, 1, **step), (5, 40), 0) == "2.0"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["python3", "train.py", "--lr", "0.1"], "python3 train.py --lr 0.1"),
        (["--api-key=abc", "--lr=1"], "--api-key=*** --lr=1"),
        (["--api_key", "abc", "x"], "--api_key *** x"),
        (["--wandb-token", "abc"], "--wandb-token ***"),
        (["--password"], "--password"),
        (["--password", "--flag"], "--password --flag"),
        (["-p", "8080"], "-p 8080"),
        (["WANDB_API_KEY=abc", "python"], "WANDB_API_KEY=*** python"),
        (["+logger.wandb.apiKey=abc"], "+logger.wandb.apiKey=***"),
        (
            ["--max-tokens", "5", "--tokenizer", "gpt2", "--num_tokens=7"],
            "--max-tokens 5 --tokenizer gpt2 --num_tokens=7",
        ),
        (["s3://user:pw@host/path"], "s3://***@host/path"),
        (["hf_abcdefghijklmnopqrstuv"], "***"),
        (["-c", "x='sk-abcdefghijklmnopqrstuv'; password='s3cret'"], "-c x='***'; password='***'"),
        (["--header", "Authorization: Bearer abc"], "--header Authorization: ***"),
    ],
)
def test_redaction(arguments: list[str], text: str) -> None:
    assert command_text(arguments) == text


@given(st.lists(st.text(max_size=300), max_size=20))
def test_command_text_is_bounded_and_clean(arguments: list[str]) -> None:
    text = command_text(arguments)
    assert len(text) <= 1024
    assert not any(ord(c) < 32 for c in text)
