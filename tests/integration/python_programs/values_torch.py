"""Tensors of several dtypes, shapes and devices, in locals, modules and attributes; then it waits for a line."""

import json
import sys

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.seq = torch.nn.Sequential(torch.nn.Linear(2, 1))
        self.register_buffer("count", torch.tensor(3))


def told(t):
    number = t.item() if t.numel() == 1 and t.device.type == "cpu" else None
    return [list(t.shape), str(t.dtype).split(".")[1], str(t.device), number]


def train(model):
    loss = torch.tensor(0.693)
    graph = (model.fc.weight.sum() * 0 + 1.5).sum()
    double = torch.tensor([2.5], dtype=torch.float64)
    brain = torch.tensor(1.25, dtype=torch.bfloat16)
    half = torch.tensor(-0.5, dtype=torch.float16)
    number = torch.tensor(2**40)
    flag = torch.tensor(True)
    view = torch.arange(10)[7]
    shape = torch.zeros(2, 3, dtype=torch.int64)
    deep = torch.zeros(2, 1, 1, 1, 1, 2, 3, dtype=torch.bfloat16)
    empty = torch.zeros(0, 4)
    meta = torch.empty(2, 3, device="meta")
    meta_scalar = torch.empty((), device="meta")
    complicated = torch.zeros(2, dtype=torch.complex64)
    strange = torch.tensor(1 + 2j)
    parameter = torch.nn.Parameter(torch.ones(4, 5))
    numbers = {"loss": loss, "list": [number, flag]}
    found = locals()
    tensors = {n: told(t) for n, t in found.items() if isinstance(t, torch.Tensor) and t is not strange}
    print(json.dumps(tensors), flush=True)
    sys.stdin.readline()
    return graph, double, brain, half, view, shape, deep, empty, meta, meta_scalar, complicated, parameter, numbers


train(Model())
