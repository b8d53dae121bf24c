"""A job of one process without collectives: ``optimizers.py LIST`` with KIND in the environment.

``fused``, ``foreach``, ``loop``, ``sgd``: AdamW of that kind, or SGD over lists. ``plain_sgd``: SGD in a loop.
``groups``: three groups of parameters. ``two``: two optimizers, the first of which runs three times a step. It says
``ready``, then makes as many steps as a line of stdin says (``steps N``), and answers ``done``. LIST gets a line before
each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch

KIND = os.environ["KIND"]
MODEL = [torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(n)]) for n in (20, 6, 3)]


def run(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[], None]:
    def once() -> None:
        optimizer.zero_grad()
        model(torch.ones(256, 64)).square().mean().backward()
        optimizer.step()

    return once


def parts() -> list[Callable[[], None]]:
    whole = torch.nn.Sequential(*MODEL)
    if KIND == "two":
        critic, generator = (run(torch.optim.AdamW(m.parameters(), fused=True), m) for m in MODEL[:2])
        return [critic, critic, critic, generator]
    if KIND == "groups":
        groups = [{"params": list(m.parameters()), "lr": 0.1 / n} for n, m in enumerate(MODEL, 1)]
        return [run(torch.optim.AdamW(groups, foreach=True), whole)]
    if KIND in ("sgd", "plain_sgd"):
        return [run(torch.optim.SGD(whole.parameters(), lr=0.001, foreach=KIND == "sgd"), whole)]
    return [run(torch.optim.AdamW(whole.parameters(), fused=KIND == "fused", foreach=KIND == "foreach"), whole)]


def main() -> None:
    torch.set_num_threads(1)
    work, step = parts(), 0
    with open(sys.argv[1], "w") as journal:
        print("ready", flush=True)
        while words := os.read(0, 100).decode().split():
            for _ in range(int(words[1])):
                journal.write(json.dumps({"step": step, "before_ns": time.monotonic_ns()}) + "\n")
                for part in work:
                    part()
                step += 1
            journal.flush()
            print("done", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
