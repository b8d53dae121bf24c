"""Roles: who trains, who launches, who helps."""

from __future__ import annotations

import pytest

from probing.daemon.processes.facts import Facts
from probing.daemon.processes.roles import interpreter_target, launches, roles

PYTHON = "/usr/bin/python3.11"
RANK0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
RANK1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCH = frozenset({"torch"})
GLOO = frozenset({"python3", "pt_gloo_runloop"})
TRAIN = ("python3", "-u", "train.py")
SPAWN = ("python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(5)", "--multiprocessing-fork")


def process(pid: int, *above: Facts, cmdline: tuple[str, ...] = TRAIN, exe: str = PYTHON, **more: object) -> Facts:
    ancestors = tuple((a.pid, a.start_ns, a.program) for a in above)
    return Facts(pid, pid * 100, exe=exe, cmdline=cmdline, ancestors=ancestors, **more)  # type: ignore[arg-type]


def by_pid(*processes: Facts) -> dict[int, str]:
    return {pid: role for (pid, _), role in roles(processes).items()}


TORCHRUN = process(1, cmdline=("python3", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"), libraries=TORCH)


@pytest.mark.parametrize(
    ("cmdline", "expected"),
    [
        (("python3", "-u", "train.py", "-m", "x"), ("script", "train.py", ("-m", "x"))),
        (("python3", "-m", "torch.distributed.run", "a"), ("module", "torch.distributed.run", ("a",))),
        (("python3", "-um", "mod"), ("module", "mod", ())),
        (("/lib64/ld-linux-x86-64.so.2", "/usr/bin/python3", "-u", "train.py"), ("script", "train.py", ())),
        (("/lib/ld-musl-x86_64.so.1", "--library-path", "/x", "/bin/python3", "-m", "mod"), ("module", "mod", ())),
        (("/lib64/ld-linux-x86-64.so.2", "--list"), ("", "", ())),
        (("python3", "-X", "dev", "-W", "error", "-c", "pass"), ("code", "pass", ())),
        (("python3",), ("", "", ())),
        (("python3", "-m"), ("", "", ())),
        ((), ("", "", ())),
    ],
)
def test_interpreter_target(cmdline: tuple[str, ...], expected: tuple[str, str, tuple[str, ...]]) -> None:
    assert interpreter_target(cmdline) == expected


@pytest.mark.parametrize(
    "cmdline",
    [
        ("python3", "/venv/bin/torchrun", "train.py"),
        ("python3", "-m", "torch.distributed.run", "train.py"),
        ("python3", "-m", "torch.distributed.launch", "train.py"),
        ("python3", "/lib/torch/distributed/run.py", "train.py"),
        ("python3", "/venv/bin/accelerate", "launch", "train.py"),
        ("python3", "-m", "accelerate.commands.launch", "train.py"),
        ("python3", "/venv/bin/deepspeed", "train.py"),
        ("python3", "-u", "-m", "deepspeed.launcher.launch", "train.py"),
    ],
)
def test_launch_commands(cmdline: tuple[str, ...]) -> None:
    assert launches(process(1, cmdline=cmdline))


@pytest.mark.parametrize("cmdline", [("python3", "my_torchrun.py"), ("python3", "/bin/accelerate", "config"), TRAIN])
def test_no_launch_commands(cmdline: tuple[str, ...]) -> None:
    assert not launches(process(1, cmdline=cmdline))


def test_torchrun() -> None:
    ranks = [process(pid, TORCHRUN, environ=env) for pid, env in ((2, RANK0), (3, RANK1))]
    # A rank trains from its first instant, before it has imported anything.
    assert by_pid(TORCHRUN, *ranks) == {1: "launcher", 2: "trainer", 3: "trainer"}


def test_helpers_of_a_trainer() -> None:
    rank = process(2, TORCHRUN, environ=RANK0, libraries=TORCH, threads=GLOO)
    tracker = process(
        3,
        rank,
        TORCHRUN,
        environ=RANK0,
        cmdline=("python3", "-c", "from multiprocessing.resource_tracker import main;main(9)"),
    )
    forked = process(4, rank, TORCHRUN, environ=RANK0, libraries=TORCH)
    named = process(5, rank, TORCHRUN, environ=RANK0, libraries=TORCH, comm="pt_data_worker")
    spawned = process(6, rank, TORCHRUN, environ=RANK0, cmdline=SPAWN)
    compiler = process(
        7,
        rank,
        TORCHRUN,
        environ=RANK0,
        libraries=TORCH,
        cmdline=("python3", "/x/torch/_inductor/compile_worker/__main__.py"),
    )
    tool = process(8, rank, TORCHRUN, environ=RANK0, cmdline=("python3", "evaluate.py"))
    assert by_pid(TORCHRUN, rank, tracker, forked, named, spawned, compiler, tool) == {
        1: "launcher",
        2: "trainer",
        3: "other",
        4: "data_loader",
        5: "data_loader",
        6: "data_loader",
        7: "other",
        8: "other",
    }


def test_parent_of_mp_spawn() -> None:
    parent = process(1, libraries=TORCH)
    tracker = process(2, parent, cmdline=("python3", "-c", "from multiprocessing.resource_tracker import main;main(9)"))
    young = process(3, parent, cmdline=SPAWN, libraries=TORCH)
    assert by_pid(parent, tracker, young) == {1: "trainer", 2: "other", 3: "other"}
    grown = [process(pid, parent, cmdline=SPAWN, libraries=TORCH, threads=GLOO) for pid in (3, 4)]
    loader = process(5, grown[0], parent, cmdline=SPAWN, libraries=TORCH)
    assert by_pid(parent, tracker, *grown, loader) == {
        1: "launcher",
        2: "other",
        3: "trainer",
        4: "trainer",
        5: "data_loader",
    }


def test_a_wrapper_that_starts_the_real_trainer() -> None:
    wrapper = process(2, TORCHRUN, environ=RANK0, cmdline=("python3", "wrapper.py"))
    young = process(3, wrapper, TORCHRUN, environ=RANK0)
    assert by_pid(TORCHRUN, wrapper, young) == {1: "launcher", 2: "trainer", 3: "other"}
    grown = process(3, wrapper, TORCHRUN, environ=RANK0, libraries=TORCH)
    assert by_pid(TORCHRUN, wrapper, grown) == {1: "launcher", 2: "launcher", 3: "trainer"}


def test_a_small_job_inside_a_rank_leaves_it_a_trainer() -> None:
    rank = process(2, TORCHRUN, environ=RANK0, libraries=TORCH)
    inner = process(
        3, rank, TORCHRUN, environ={"RANK": "0", "WORLD_SIZE": "1"}, libraries=TORCH, cmdline=("python3", "eval.py")
    )
    assert by_pid(TORCHRUN, rank, inner) == {1: "launcher", 2: "trainer", 3: "trainer"}


def test_a_notebook_that_starts_torchrun() -> None:
    notebook = process(9, cmdline=("python3", "-m", "ipykernel_launcher"), libraries=TORCH)
    torchrun = process(10, notebook, cmdline=TORCHRUN.cmdline, libraries=TORCH)
    rank = process(11, torchrun, notebook, environ=RANK0, libraries=TORCH)
    assert by_pid(notebook, torchrun, rank) == {9: "launcher", 10: "launcher", 11: "trainer"}


def test_slurm_variables_alone_do_not_make_a_trainer() -> None:
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert by_pid(process(1, environ=env)) == {1: "other"}
    assert by_pid(process(1, environ=env, libraries=TORCH)) == {1: "trainer"}


def test_native_launchers_only_with_a_training() -> None:
    mpirun = process(1, exe="/usr/bin/mpirun", cmdline=("mpirun", "-n", "2", "bash", "job.sh"))
    assert by_pid(mpirun) == {}
    rank = process(3, mpirun, environ={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, libraries=TORCH)
    assert by_pid(mpirun, rank) == {1: "launcher", 3: "trainer"}


def test_what_is_not_watched() -> None:
    shell = process(1, exe="/bin/bash", cmdline=("bash",), environ=RANK0)
    plain = process(2, cmdline=("python3", "manage.py"))
    embedded = process(3, exe="/opt/app/engine", cmdline=("engine",), libraries=frozenset({"python", "torch"}))
    assert by_pid(shell, plain, embedded) == {3: "trainer"}


def test_a_rank_that_rank_0_starts_is_a_rank_and_its_checkpoint_process_is_none() -> None:
    first = process(1, libraries=TORCH, threads=GLOO)
    # Lightning: the same command, and no RANK.
    second = process(2, first, cmdline=("/usr/bin/python3", "-u", "/home/user/train.py"), libraries=TORCH, threads=GLOO)
    loader = process(3, first, libraries=TORCH)
    # An asynchronous checkpoint of torch has a process with a group of its own beside each rank.
    checkpoint = process(4, first, cmdline=SPAWN, libraries=TORCH, threads=GLOO)
    assert by_pid(first, second, loader, checkpoint) == {1: "trainer", 2: "trainer", 3: "data_loader", 4: "other"}
    ranked = process(1, libraries=TORCH, threads=GLOO, environ=RANK1)
    helper = process(2, ranked, libraries=TORCH, threads=GLOO, environ=RANK1)
    assert by_pid(ranked, helper)[2] != "trainer"
