"""The situations that `diagnose` must recognise, by id. Verdicts name those that they recognise."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("SITUATIONS", "Situation")


@dataclass(frozen=True, slots=True)
class Situation:
    """``group``: hang, slow, hardware or before (the job starts). ``shown_by``: what shows it instead of a verdict;
    empty: a verdict does."""

    id: str
    group: str
    text: str
    shown_by: str = ""


_BALANCE, _RANKS = "shown by `probingctl balance`", "shown by `probingctl ranks check`"
_PREFLIGHT = "comes with `probingctl preflight`"

SITUATIONS: tuple[Situation, ...] = (
    Situation("branch", "hang", "Only some ranks take a branch that has a collective."),
    Situation("uneven_data", "hang", "One rank has a batch less: it is behind the loop while the others are in it."),
    Situation("swallowed_exception", "hang", "A rank catches an exception, continues, and so skips a collective."),
    Situation("dead_rank", "hang", "A rank died, and the others wait for it."),
    Situation("blocked_rank", "hang", "A rank is stopped, in uninterruptible I/O, or holds the GIL in C."),
    Situation("busy_rank", "hang", "A rank writes logs or a checkpoint while the others wait at a barrier."),
    Situation("blocked_storage", "hang", "Ranks that use the same file system block in it."),
    Situation("starved_loader", "hang", "A data loader gets no data, or a worker of it died."),
    Situation("nccl_timeout", "hang", "NCCL would time out after 30 minutes: the stall is named within 15 seconds."),
    Situation("none_completes", "hang", "All ranks have joined a collective, and it completes on none."),
    Situation("idle_server", "hang", "A server has no requests: its ranks wait for the one that receives them."),
    Situation("lingering_rank", "hang", "A rank does not end: it waits for a thread, a child or an upload."),
    Situation("communicator_error", "hang", "The library reports an error of a communicator, or it was aborted."),
    Situation("slow_rank", "slow", "One slow rank slows every step."),
    Situation("throttled_gpu", "slow", "A GPU is throttled, by heat or power."),
    Situation("slow_gpu_pair", "slow", "Two GPUs are connected by a slow path instead of NVLink."),
    Situation("mixed_devices", "slow", "GPU models, memory sizes or precisions differ in one job."),
    Situation("memory_imbalance", "slow", "Ranks differ in the memory that they use."),
    Situation("memory_growth", "slow", "Memory grows until the kernel kills a rank."),
    Situation("cpu_contention", "slow", "A rank lacks CPU: contention, a cgroup's quota, or bad affinity."),
    Situation("network_faults", "slow", "Retransmits, discards, congestion marks, or links that go down."),
    Situation("lost_scaling", "slow", "More ranks are less efficient.", _BALANCE),
    Situation("uneven_work", "slow", "Ranks have unequal work, on equal machines."),
    Situation("job_slowdown", "slow", "All ranks are slower than the job was before."),
    Situation("bad_numbers", "slow", "A loss is NaN or infinite, or jumps."),
    Situation("gpu_faults", "hardware", "ECC errors, XIDs, errors of PCIe or NVLink, or a lost GPU."),
    Situation("host_faults", "hardware", "Fans, power, or a disk that is nearly full."),
    Situation("flapping_link", "hardware", "An InfiniBand link goes up and down."),
    Situation("unreachable_node", "hardware", "A node cannot be reached."),
    Situation("versions", "before", "Nodes differ in Python, torch, CUDA, driver or NCCL.", _PREFLIGHT),
    Situation("environment", "before", "NCCL_* and TORCH_* variables differ, or name what is not there.", _PREFLIGHT),
    Situation("resources", "before", "Shared memory, disks, GPUs, clocks or ports do not suit the job.", _PREFLIGHT),
    Situation("bad_ranks", "before", "RANK or LOCAL_RANK is wrong, or there are two masters.", _RANKS),
)
