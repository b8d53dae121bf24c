"""Jobs in which a rank decides by itself whether it calls a collective: ``divergences.py CASE FOLDER``; see ranks.py.

Each is the smallest job with the cause of a public report, which its docstring names. The rank at fault is rank 1, or
rank 0 where the fault is typical of that rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from ranks import STEP_S, Job, main
from torch import Tensor
from torch.fx import GraphModule

DEADLINE_S = 60.0
IN_FLIGHT = 4
Group = dist.ProcessGroup


def own_deadlines(job: Job) -> None:
    """Each rank drops late requests by its own clock, as in sglang#27221; that of rank 1 is ahead once it is due."""
    job.train()
    for _ in count():
        batch = receive_batch(job)
        if not drop_late(job, batch):
            continue
        time.sleep(STEP_S)
        dist.all_reduce(torch.ones(64))


def receive_batch(job: Job) -> float:
    """Returns when the requests of a batch came, as rank 0 tells it."""
    came = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.broadcast(came, 0)
    return float(came)


def drop_late(job: Job, came: float) -> bool:
    late = DEADLINE_S if job.rank == 1 else 0.0
    if late:
        job.begin()
    return time.perf_counter() + late - came < DEADLINE_S


def own_queue(job: Job) -> None:
    """Rank 0 leaves a loop over its own queue later than the others, as in sglang#22607: it is in a collective of the
    group of the cache, and they wait for it in one of the group that computes."""
    cache = dist.new_group(range(job.size), group_desc="HICACHE_GROUP")

    def work() -> None:
        drain_events(job, cache, deque([1]))
        time.sleep(STEP_S)

    job.train(work)
    if job.rank == 0:
        job.begin()
    drain_events(job, cache, deque([1, 1] if job.rank == 0 else [1]))
    dist.broadcast(torch.ones(5), 0)
    job.go_on(work)


def drain_events(job: Job, cache: Group, events: deque[int]) -> None:
    while events:
        events.popleft()
        dist.all_reduce(torch.ones(7), group=cache)


def zero_tokens(job: Job) -> None:
    """A rank without tokens skips the coordination of its step, as in vllm#43547: its calls there fall behind by one in
    each such step, until the others wait for it."""
    coordinate = dist.new_group(range(job.size), group_desc="DP_CPU_GROUP")
    begun: deque[dist.Work] = deque()

    def step(tokens: int) -> None:
        if tokens:
            coordinate_batch(begun, coordinate)
        time.sleep(STEP_S)
        dist.all_gather([torch.empty(3) for _ in range(job.size)], torch.ones(3))

    job.train(partial(step, 5))
    if job.rank == 1:
        job.begin()
    for number in count():
        step(0 if job.rank == 1 and number % 3 == 2 else 5)


def coordinate_batch(begun: deque[dist.Work], group: Group) -> None:
    """Sums the tokens of a batch; waits for the sum of some batches ago."""
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work is not None
    begun.append(work)
    if len(begun) > IN_FLIGHT:
        begun.popleft().wait()


def early_eos(job: Job) -> None:
    """Rank 1 has generated its text sooner and goes on with another pass, as in DeepSpeed#8262: its gather is of other
    parameters than that of the others, who still generate."""
    job.train()
    if job.rank == 1:
        job.begin()
        teacher_forward(job)
    for _ in count():
        generate_token(job)


def generate_token(job: Job) -> None:
    gather(job, 1013)
    time.sleep(STEP_S)


def teacher_forward(job: Job) -> None:
    gather(job, 4051)


def gather(job: Job, parameters: int) -> None:
    part = torch.ones(parameters)
    dist.all_gather([torch.empty_like(part) for _ in range(job.size)], part)


def idle_expert(job: Job) -> None:
    """No token of rank 1 goes to an expert, so that the hook of its gradient never runs, as in DeepSpeed#5008."""
    experts = dist.new_group(range(job.size), group_desc="EXPERT_DATA_PARALLEL_GROUP")
    dense, expert = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    for parameter in expert.parameters():
        parameter.register_post_accumulate_grad_hook(partial(reduce_gradient, group=experts))

    def step(*, routed: bool) -> None:
        time.sleep(STEP_S)
        hidden = dense(torch.ones(4, 8))
        (expert(hidden) if routed else hidden).sum().backward()
        dist.all_reduce(torch.ones(5))

    job.train(partial(step, routed=True))
    if job.rank == 1:
        job.begin()
    while True:
        step(routed=job.rank != 1)


def reduce_gradient(parameter: Tensor, group: Group) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)


def warm_cache(job: Job) -> None:
    """Rank 0 alone finds what it tuned at an earlier start, as in vllm#57423; the others tune together."""
    job.train()
    if job.rank == 0:
        job.begin()
        load_tactics()
    else:
        tune_kernels()
    dist.barrier()


def load_tactics() -> None:
    time.sleep(STEP_S)


def tune_kernels() -> None:
    for _ in range(8):
        time.sleep(STEP_S)
        dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX)


def recompiles(job: Job) -> None:
    """Rank 1 compiles once more, for another shape, and asks the others about it, as in pytorch#193043; they do not
    compile. The backend asks here: the collective of torch 2.13's own compiler fails without a GPU."""
    compilers = dist.new_group(range(job.size), group_desc="pt2_compile_pg")

    def backend(graph: GraphModule, _: object) -> Callable[..., object]:
        dist.all_reduce(torch.ones(3), group=compilers)
        return graph.forward

    torch._dynamo.config.automatic_dynamic_shapes = False  # type: ignore[attr-defined]
    model = torch.compile(torch.nn.Linear(16, 4), backend=backend)

    def step(batch: int) -> None:
        time.sleep(STEP_S)
        model(torch.ones(batch, 16))

    job.train(partial(step, 8))
    if job.rank == 1:
        job.begin()
    job.go_on(partial(step, 5 if job.rank == 1 else 8))


CASES: dict[str, Callable[[Job], object]] = {
    case.__name__: case
    for case in (own_deadlines, own_queue, zero_tokens, early_eos, idle_expert, warm_cache, recompiles)
}

if __name__ == "__main__":
    main(CASES)
