"""Whose a job is: environment variables name it, the kernel says which user's it is."""

from __future__ import annotations

from typing import Any

import pytest

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Job, job_of, slurm_job
from probing.daemon.processes.owners import MAX_NAMES, JobNames
from probing.daemon.processes.registry import Process, Registry
from probing.daemon.processes.rows import detail_of, process_from_detail

ALICE, BOB, STRANGER = 1000, 1001, 65534
STEP = "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"
POD = "/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-" + "0" * 64 + ".scope"


class Node:
    """A registry, and processes by their pids."""

    def __init__(self) -> None:
        self.registry = Registry("n1", "boot")
        self.pids = iter(range(100, 10_000))

    def rank(self, rank: int, owner: int, *, pid: int = 0, cgroup: str = "/", **environ: str) -> Process:
        pid = pid or next(self.pids)
        given = {"RANK": str(rank), "WORLD_SIZE": "3", **environ}
        facts = Facts(
            pid,
            pid,
            uid=owner,
            owner=owner,
            exe="/usr/bin/python3",
            environ=given,
            current=frozenset(given),
            cgroup=(cgroup,),
            libraries=frozenset({"python", "torch"}),
            threads=frozenset({"pt_gloo_runloop"}),
        )
        self.registry.update([facts])
        return self.now(facts.key)

    def now(self, key: Any) -> Process:
        process = self.registry.get(key)
        assert process is not None
        return process

    def job(self, process: Process) -> str:
        return self.now(process.key).identity.job


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}, "4711.0"),
        ({"TORCHELASTIC_RUN_ID": "llama"}, "llama"),
        ({"RAY_JOB_ID": "01000000"}, "01000000"),
        ({"MASTER_ADDR": "gn6", "MASTER_PORT": "29500"}, "gn6:29500"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "n1/127.0.0.1:29500"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_NAME": "bert", "POD_NAMESPACE": "ml"}, "ml/bert"),
    ],
)
def test_a_stranger_who_claims_a_rank_has_a_job_of_their_own(environ: dict[str, str], name: str) -> None:
    here = Node()
    ranks = [here.rank(number, ALICE, **environ) for number in range(3)]
    stranger = here.rank(2, STRANGER, **environ)
    assert [here.job(rank) for rank in ranks] == [name] * 3
    assert here.job(stranger) == f"{name} (uid {STRANGER})"
    assert (stranger.identity.owner, ranks[0].identity.owner) == (STRANGER, ALICE)


def test_a_stranger_who_was_first_is_kept_apart_as_well() -> None:
    here = Node()
    stranger = here.rank(0, STRANGER, TORCHELASTIC_RUN_ID="llama")
    rank = here.rank(0, ALICE, TORCHELASTIC_RUN_ID="llama")
    assert here.job(rank) != here.job(stranger)
    # Nobody can take the name that another owner's job is shown by.
    third = here.rank(0, BOB, TORCHELASTIC_RUN_ID=f"llama (uid {ALICE})")
    assert here.job(third) == f"llama (uid {ALICE}) (uid {BOB})"


def test_the_control_group_of_slurm_names_the_job() -> None:
    here = Node()
    # A stranger has the name first; the process in the group of job_4711 proves whose it is.
    stranger = here.rank(0, STRANGER, SLURM_JOB_ID="4711")
    assert here.job(stranger) == "4711"
    rank = here.rank(0, ALICE, cgroup=STEP, SLURM_JOB_ID="4711")
    here.registry.update([])
    assert here.job(rank) == "4711"
    assert here.job(stranger) == f"4711 (uid {STRANGER})"
    # What a process in job_4711 says of another job does not count.
    liar = here.rank(1, BOB, cgroup=STEP.replace("4711", "4712"), SLURM_JOB_ID="4711")
    assert here.job(liar) == "4712"
    # Where Slurm has groups, a new name of it needs one; the user of a proven job needs none (torchrun over ssh).
    assert here.job(here.rank(0, STRANGER, SLURM_JOB_ID="4713")) == f"4713 (uid {STRANGER})"
    assert here.job(here.rank(1, ALICE, SLURM_JOB_ID="4711")) == "4711"


def test_a_pod_proves_that_a_name_is_of_kubernetes() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_NAME": "bert"}
    here = Node()
    rank = here.rank(0, 0, cgroup=POD, **pod)
    assert here.job(rank) == "bert"
    assert here.job(here.rank(0, STRANGER, **{**pod, "JOB_NAME": "other"})) == f"other (uid {STRANGER})"
    # A user can make a group of that name below user.slice.
    fake = "/user.slice/user-65534.slice/user@65534.service" + POD
    assert here.job(here.rank(0, STRANGER, cgroup=fake, **{**pod, "JOB_NAME": "third"})) == f"third (uid {STRANGER})"


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/slurm/uid_1000/job_12/step_0/task_0", "12"),
        ("/slurm_gn6/uid_1000/job_12/step_batch", "12"),
        ("/system.slice/slurmstepd.scope/job_12/step_extern/user/task_special", "12"),
        ("/system.slice/gn6_slurmstepd.scope/job_12", "12"),
        ("/../../system.slice/slurmstepd.scope/job_12/step_0", "12"),
        ("/user.slice/user-1000.slice/system.slice/slurmstepd.scope/job_12", ""),
        ("/user.slice/slurm/uid_1000/job_12", ""),
        ("/system.slice/slurmstepd.scope/job_12x", ""),
        ("/slurm/job_12", ""),
        ("/", ""),
    ],
)
def test_groups_of_slurm(path: str, job: str) -> None:
    assert slurm_job(["/", path]) == job
    claimed = job_of({"SLURM_JOB_ID": "12"}, "n1", cgroup=[path])
    assert claimed is not None
    assert claimed.proven == bool(job)


def test_ranks_of_one_owner_who_share_a_launcher_are_one_job_whatever_runs_it() -> None:
    here = Node()
    ranks = [here.rank(number, ALICE, TORCHELASTIC_RUN_ID="llama") for number in range(3)]
    assert len({(here.job(rank), here.now(rank.key).identity.run) for rank in ranks}) == 1


def test_a_job_that_another_user_starts_again_is_theirs() -> None:
    here = Node()
    first = here.rank(0, ALICE, TORCHELASTIC_RUN_ID="llama")
    here.registry.end(first.key)
    assert here.job(here.rank(0, BOB, TORCHELASTIC_RUN_ID="llama")) == f"llama (uid {BOB})"
    assert here.job(here.rank(0, ALICE, TORCHELASTIC_RUN_ID="llama")) == "llama"


def test_a_name_stays_its_owners_when_the_daemon_starts_again() -> None:
    here = Node()
    rank = here.rank(0, ALICE, TORCHELASTIC_RUN_ID="llama")
    detail = detail_of(here.now(rank.key), "boot")
    later = Node()
    restored = process_from_detail(*rank.key, detail, "boot")
    assert restored is not None
    later.registry.restore(*restored, ended=True)
    assert later.job(later.rank(0, STRANGER, TORCHELASTIC_RUN_ID="llama")) == f"llama (uid {STRANGER})"
    assert later.job(later.rank(0, ALICE, TORCHELASTIC_RUN_ID="llama")) == "llama"


def test_many_names_of_a_user_take_no_name_of_another() -> None:
    names = JobNames()
    assert names.name(Job("llama", "torchelastic"), ALICE) == "llama"
    for number in range(MAX_NAMES + 23):
        names.name(Job(f"job-{number}", "torchelastic"), STRANGER)
    assert names.name(Job("llama", "torchelastic"), BOB) == f"llama (uid {BOB})"
    # The oldest of the user with most of them are forgotten.
    assert names.name(Job("job-0", "torchelastic"), BOB) == "job-0"
    assert names.name(Job(f"job-{MAX_NAMES + 22}", "torchelastic"), BOB) == f"job-{MAX_NAMES + 22} (uid {BOB})"


@pytest.mark.parametrize("cgroup", ["/", STEP])
@pytest.mark.parametrize("executes", [False, True])
def test_ranks_that_give_up_the_rights_of_root_are_the_users(cgroup: str, executes: bool) -> None:
    """A container's entry point starts as root, and the name of the job was seen by then. With exec, the first reading
    may be from the middle of it: the user of before, the environment of after."""
    here, claims = Node(), {"SLURM_JOB_ID": "4711"}
    ranks = [here.rank(number, 0, cgroup=cgroup, **claims) for number in range(3)]
    assert {here.job(rank) for rank in ranks} == {"4711"}
    for number, rank in enumerate(ranks):
        if executes:
            here.registry.replaced(rank.key)
        here.rank(number, ALICE, pid=rank.key.pid, cgroup=cgroup, **claims)
    now = [here.now(rank.key).identity for rank in ranks]
    assert {(who.job, who.owner) for who in now} == {("4711", ALICE)}
    assert len({who.run for who in now}) == 1
    assert here.job(here.rank(0, STRANGER, **claims)) == f"4711 (uid {STRANGER})"
