"""A small data-parallel training: torch DDP over gloo, on the CPU.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 200
    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python examples/train_ddp.py

Each rank learns the same small classifier on its own share of a synthetic data set, drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES = 64
CLASSES = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small classifier with DistributedDataParallel on gloo.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples a rank and step (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="extra time a step, as for slow input")
    parser.add_argument("--workers", type=int, default=0, help="data loader processes a rank (default: %(default)s)")
    parser.add_argument("--report-every", type=int, default=50, help="steps between two lines of rank 0")
    return parser.parse_args()


def make_data(samples: int) -> TensorDataset:
    """Points around one centre a class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    points = centres[labels] + 0.5 * torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(points, labels)


def make_model(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, points: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = nn.functional.cross_entropy(model(points), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(arguments: argparse.Namespace) -> float:
    """Returns the loss of the last step, averaged over all ranks."""
    data = make_data(arguments.batch * 64 * dist.get_world_size())
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=2)
    loader = DataLoader(data, arguments.batch, sampler=sampler, num_workers=arguments.workers, drop_last=True)
    model = DistributedDataParallel(make_model(arguments.hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = torch.zeros(())
    step = epoch = 0
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = train_step(model, optimizer, points, labels)
            time.sleep(arguments.delay_ms / 1000)
            step += 1
            if step % arguments.report_every == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step >= arguments.steps:
                break
        epoch += 1
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        loss = train(arguments)
        if dist.get_rank() == 0:
            print(f"trained {arguments.steps} steps on {dist.get_world_size()} ranks, loss {loss:.4f}", flush=True)
        # All leave together. Torch 2.13 can abort at exit ("terminate called"), when a thread of gloo that has finished
        # an operation frees its tensors so late that the interpreter has ended.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
