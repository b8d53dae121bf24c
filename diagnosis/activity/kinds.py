"""The kinds of activity that docs/verdicts.md describes: what each means, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ("ACTIVITIES", "Kind")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of activity. ``shown_by``: the facts that show this activity."""

    title: str
    shown_by: str
    next_steps: tuple[str, ...]


ACTIVITIES: Mapping[str, Kind] = MappingProxyType(
    {
        "exited": Kind(
            "The process has ended",
            "The kernel's report of its end: exit code, signal, and whether it was killed for memory.",
            (
                "Read its last lines: `probingctl logs --job J --rank R`.",
                "Look at the end of its node: `probingctl events --job J`.",
            ),
        ),
        "stopped": Kind(
            "The process is stopped by a signal, or frozen by its cgroup",
            "State T, or a frozen cgroup. The kernel does not record who sent the signal.",
            (
                "Continue it: `kill -CONT PID`, or thaw its cgroup.",
                "Look for a shell with job control, a scheduler that suspends jobs, or a checkpointing tool.",
            ),
        ),
        "traced": Kind(
            "A debugger or tracer holds the process",
            "State t, and the process that TracerPid names.",
            ("Let the debugger continue or detach.",),
        ),
        "lock": Kind(
            "The thread that trains waits for a lock, a queue, another thread or a file lock",
            "Frames of threading, queue or multiprocessing; native frames that take a lock; futex, flock or fcntl.",
            ("Look at the other threads: `probingctl stacks --job J PID --native --locals`.",),
        ),
        "cuda_context_lock": Kind(
            "It waits for a CUDA context into which a thread loads code",
            "Native frames of the load of a module, and of a call that needs the context.",
            (
                "Set CUDA_MODULE_LOADING=EAGER, or launch each kernel once before the first collective.",
                "Look for a rank whose kernel waits for this one: `probingctl stacks --job J --native`.",
            ),
        ),
        "stdin": Kind(
            "The thread that trains waits for input",
            "A read of descriptor 0, or frames of a Python debugger.",
            ("Remove the breakpoint or the call of input().", "Start the job with its standard input from /dev/null."),
        ),
        "pipe": Kind(
            "The thread that trains waits for the other end of a pipe or FIFO",
            "A system call on a pipe or FIFO.",
            ("Find the process at the other end: `lsof | grep PIPE`.",),
        ),
        "data_loader": Kind(
            "The thread that trains waits for the next batch, or reads it itself",
            "Frames of the data loader; stacks of its workers.",
            ("Look at the stacks of its data-loader workers: `probingctl stacks --job J --native`.",),
        ),
        "data_loader_worker": Kind(
            "A data-loader worker has died, is stopped or makes no progress",
            "Frames of the data loader or of a queue between processes, and the end, state or stack of a worker.",
            (
                "Look at the stacks of its workers: `probingctl stacks --job J --native`.",
                "If a worker died, find the reason: `probingctl events --job J`, and OOM kills in the kernel's log.",
            ),
        ),
        "checkpoint": Kind(
            "The thread that trains writes or reads a checkpoint",
            "Frames of torch.save, torch.load or torch.distributed.checkpoint; the file and its file system.",
            ("Check the file system of the checkpoint: space, server, other writers.",),
        ),
        "disk_io": Kind(
            "The thread that trains waits for a file system",
            "State D, or a system call on a file; file, mount and type of file system.",
            ("Check the file system: its server, its disk, the kernel's log.",),
        ),
        "gil_held": Kind(
            "A thread keeps the GIL while it runs or waits in C",
            "The holder of the GIL and its stack, which does not move.",
            ("Let the extension release the GIL around that call.",),
        ),
        "swapping": Kind(
            "The process waits for pages that were swapped out",
            "Major page faults a second, and memory in swap.",
            ("Free memory on the node, or start fewer processes there.",),
        ),
        "throttled": Kind(
            "The cgroup's CPU quota stops the process",
            "Throttled time and quota of its cgroup.",
            ("Raise the CPU limit of the container or job.",),
        ),
        "starved": Kind(
            "The process is ready to run and gets no CPU",
            "The time that its training thread waited for a CPU, and the processes that used its CPUs.",
            ("Move the other processes away, or give the rank CPUs of its own.",),
        ),
        "compiling": Kind(
            "It compiles",
            "Frames of torch.compile, Triton or C++ extensions, or a compiler as its child.",
            ("Wait: the first steps take longer. Share the cache of the compiler between ranks.",),
        ),
        "garbage_collection": Kind(
            "Python collects garbage",
            "Native frames of CPython's collector.",
            ("Call gc.freeze() after the start, gc.disable(), and gc.collect() on all ranks at the same steps.",),
        ),
        "nccl_init": Kind(
            "It waits for other ranks to create a communicator, or in a store",
            "Frames of init_process_group, of a store, or of the creation of a communicator.",
            ("Check that all ranks were started, and that MASTER_ADDR and MASTER_PORT can be reached from each node.",),
        ),
        "idle": Kind(
            "It waits for requests, like a server that has nothing to do",
            "A wait for connections on a listening socket, for ZeroMQ, for a ring of shared memory, or for a queue"
            " that a thread with such a wait fills.",
            ("Send a request, and check whether the server answers.",),
        ),
        "rpc": Kind(
            "It waits for another rank's answer by RPC",
            "Frames of torch.distributed.rpc, or a wait for a future of torch.",
            ("Look at the ranks that serve requests: `probingctl stacks --job J --native`.",),
        ),
        "sleeping": Kind(
            "It sleeps for a time that the program chose",
            "A system call that only sleeps.",
            ("Look at the line that sleeps.",),
        ),
        "child": Kind(
            "It waits for a process that it started",
            "A system call that waits for a child.",
            ("Look at what the child does.",),
        ),
        "network": Kind(
            "It waits for the network",
            "A system call on a socket, and the addresses of its ends.",
            ("Check the service at the other end, and the network in between.",),
        ),
        "bad_hardware": Kind(
            "The hardware that it uses is throttled or faulty",
            "State and events of its GPU, errors of its network port, packets that its connections lose.",
            ("Look at the parts of its node: `probingctl health`.",),
        ),
        "computing": Kind(
            "It runs",
            "State R, CPU time, or a stack that moves.",
            ("Compare its stack with that of a rank that waits: `probingctl stacks --job J --merge`.",),
        ),
        "in_collective": Kind(
            "It waits in a collective or for a send or receive",
            "An open operation, or the stack.",
            ("Look for the ranks that have not joined.",),
        ),
        "unknown": Kind(
            "The facts do not show what it does",
            "No stack, or one that no other kind recognises.",
            ("Look at its stack: `probingctl stacks --job J PID --native --locals`.",),
        ),
    }
)
