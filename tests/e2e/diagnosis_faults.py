"""The cases of the corpus of diagnosis: what is wrong with each job of tests/jobs/faults, and who is to blame."""

from __future__ import annotations

from functools import partial

from diagnosis_corpus import Case

__all__ = ("DEATHS", "DIVERGENCES", "HANGS", "IN_GATE", "LATE", "MEMORY", "SLOW")

NOTED = "the rank writes it down"
NOBODY: frozenset[str] = frozenset()
ONE = frozenset({1})
hang = partial(Case, script="hangs.py", culprits=ONE, truth=NOTED)
load = partial(Case, script="loaders.py", culprits=ONE, truth=NOTED)
thread = partial(Case, script="threads.py", ranks=3, verdict="not_joined", culprits=ONE, truth=NOTED)
engine = partial(Case, script="engines.py", ranks=2, verdict="not_joined", culprits=ONE, truth=NOTED)
diverges = partial(hang, script="divergences.py", ranks=3)
outside = partial(hang, ranks=2, verdict="not_joined")
death = partial(Case, script="deaths.py", culprits=ONE, ranks=2, verdict="rank_died", stacks=NOBODY, truth=NOTED)
slow = partial(Case, script="slow.py", culprits=ONE, ranks=2, verdict="slow_rank", stacks=NOBODY, truth=NOTED)

HANGS = (
    hang("rank0_broadcasts", ranks=3, verdict="operation_mismatch", culprits=frozenset({0}), words=("broadcast",)),
    hang("batch_less", ranks=3, verdict="operation_mismatch", words=("barrier",)),
    hang("time_loop", ranks=3, verdict="operation_mismatch", words=("all_gather",)),
    hang("swallowed", ranks=3, verdict="shifted_sequence"),
    outside("stopped", activity="stopped"),
    outside("gil", activity="gil_held", words=("tokenize",)),
    outside("lock", activity="lock", words=("record_metrics",)),
    outside("signal_lock", activity="lock", words=("dump_statistics", "signal handler", "count_tokens")),
    outside("own_lock", activity="lock", words=("read_statistics", "the same thread holds the lock")),
    outside("regex", activity="computing", words=("parse_document", "matches a regular expression", "the pattern is")),
    outside("file_lock", activity="lock", words=("prepare_dataset", "held by")),
    outside("polled_lock", activity="lock", words=("download_dataset", "polls a file lock")),
    hang("held_lock", ranks=4, verdict="deadlock", culprits=frozenset({0}), words=("read_tuned", "tuned.csv.lock")),
    outside("baton", activity="lock", words=("load_extension", "polls a file lock")),
    outside("converts", ranks=3, activity="checkpoint", culprits=frozenset({0}), advice="wait", patience_s=150),
    outside("context_lock", words=("copy_batch", "cuLibraryLoadData", "CUDA_MODULE_LOADING"), place="driver"),
    outside("stdin", activity="stdin", words=("inspect_batch",)),
    outside("checkpoint", culprits=frozenset({0}), activity="checkpoint", words=("save_checkpoint",), place="mount"),
    outside("fsdp", activity="sleeping", words=("place_experts",)),
    outside("ddp", activity="sleeping", words=("place_experts",)),
    outside("groups", ranks=8, activity="sleeping", words=("place_experts",), culprits=frozenset({5})),
    hang("cross_group", ranks=4, verdict="deadlock", culprits=frozenset({0, 1, 2}), truth="a ring of three groups"),
    hang("drifts", ranks=3, verdict="deadlock", words=("rank 1 has made 1 all_reduce less on dp",)),
    hang("unmatched", ranks=3, verdict="unmatched_p2p", culprits=frozenset({0}), words=("send",)),
    outside("dead_at_store", ranks=3, verdict="rank_died", stacks=NOBODY, words=("SIGKILL",)),
    outside("absent", verdict="init_stuck", words=("prepare_data",), joins=False),
    thread("ray_worker", activity="sleeping", words=("download_shard",)),
    thread("executor", activity="lock", words=("record_metrics",)),
    thread("embedded", activity="stdin", words=("inspect_batch",)),
    engine("tensor_parallel", activity="network", words=("fetch_blocks",)),
    engine("forked", activity="sleeping", words=("place_experts",)),
    engine("data_parallel", activity="network", words=("fetch_blocks",)),
    load("sleeping", ranks=2, verdict="not_joined", activity="data_loader", words=("read_object",)),
    load("worker_stuck", ranks=2, verdict="not_joined", activity="data_loader_worker", words=("read_object",)),
    load("worker_gone", ranks=2, verdict="not_joined", activity="data_loader_worker", words=("SIGKILL",)),
)
# Ranks that decide by themselves whether they call a collective.
DIVERGENCES = (
    diverges("own_deadlines", verdict="operation_mismatch", words=("broadcast", "receive_batch")),
    diverges("own_queue", ranks=4, verdict="deadlock", culprits=frozenset({0}), words=("HICACHE", "drain_events")),
    diverges("zero_tokens", verdict="deadlock", words=("DP_CPU_GROUP",)),
    diverges("idle_expert", verdict="deadlock", words=("EXPERT_DATA_PARALLEL_GROUP",)),
    diverges("warm_cache", verdict="operation_mismatch", culprits=frozenset({0}), words=("warm_cache",)),
    diverges("recompiles", verdict="deadlock", words=("compil",)),
)
# A case of each kind of evidence: other calls, a state of the kernel, a Python stack, a child, an exit.
# `make test-all` and `make corpus` have all cases.
IN_GATE = {"batch_less", "stopped", "lock", "worker_stuck", "killed", "ray_worker", "tensor_parallel"}
# Cases that a daemon recognises that starts late. Not cross_group: stacks do not show the group of a call.
LATE = ("batch_less", "stopped", "lock", "checkpoint", "worker_stuck", "ray_worker", "executor", "tensor_parallel")

DEATHS = (
    death("killed", ranks=3, words=("SIGKILL",)),
    death("leaves", words=("code 0",)),
    death("raises"),
    death("destroys", ranks=3, words=("which is alive and has closed its connections", "write_logs"), sockets=True),
    death("out_of_memory", words=("out of memory",), place="memory:400"),
    death("killed_loading", words=("out of memory",), place="memory:400", joins=False),
    death("worker_killed", script="loaders.py", also=("not_joined",)),
    death("worker_oom", script="loaders.py", also=("not_joined",), words=("out of memory",), place="memory:400"),
    death("shm_full", script="loaders.py", place="shm"),
    death("sizes", script="hangs.py", ranks=3, verdict="size_mismatch"),
    death("early_eos", script="divergences.py", ranks=3, verdict="size_mismatch"),
    death("dtypes", script="hangs.py", ranks=3, verdict="dtype_mismatch"),
)

MEMORY = (
    death("twice", ranks=3, verdict="memory_imbalance"),
    death("leak", verdict="memory_growth", place="memory:1200"),
)

# The first takes as long as all others together: a slowdown has to last.
SLOW = (
    slow("all_slower", verdict="job_slowdown", culprits=frozenset(), noted=ONE, words=("read_batch",)),
    slow("sleeps", words=("augment",)),
    slow("quota", activity="throttled", words=("cgroup",), place="cpu:0.2"),
    slow("bigger_batch", words=("uneven",)),
    slow("recompiles", activity="compiling", words=("it compiles in compiled", "its cache is cold"), alone=True),
    slow("cold_pages", activity="disk_io", words=("read_shard", "its page cache is cold"), alone=True),
    slow("shared_cpu", words=("shares CPU 1 with", "data-loader workers of rank 1", "free"), alone=True),
    slow("collects", words=("tidy_up",)),
    slow("beside_a_hog", words=("waits for a CPU", "hog"), beside=("hog.py", "1"), alone=True),
)
