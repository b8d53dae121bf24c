"""A rank with what the founding snippets name: ``trainer.current_step``, the table ``test``, spans and a decorator."""

import dataclasses

import torch
import torch.distributed as dist

import probing


class Trainer:
    current_step = 0


@probing.table("points")
@dataclasses.dataclass
class Point:
    x: int
    y: float


@probing.span("optimizer")
def optimize():
    trainer.current_step += 1


trainer = Trainer()
table = probing.ExternalTable("test", ["col1", "col2"])
dist.init_process_group("gloo")
table.append([dist.get_rank(), "first"])
Point(7, 0.5).save()
while True:
    with probing.span("forward"):
        dist.all_reduce(torch.ones(101))
    optimize()
