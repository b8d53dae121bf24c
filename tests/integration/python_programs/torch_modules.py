"""A model of torch with 23 layers, containers and a wrapper. It says the names of its modules as torch has them, then
stops in the forward of each leaf whose name it reads."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

wanted = ""


class Leaf(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.own_name = name

    def forward(self, x):
        if self.own_name == wanted:
            print("stopped", flush=True)
            assert sys.stdin.readline() == "on\n"
        return x + 1


class Experts(nn.ModuleDict):
    """A container with a forward of its own, in which ``self`` is in a cell up to 3.11."""

    def forward(self, x):
        return sum([self[key](x) for key in self], x)


class Block(nn.Module):
    def __init__(self, name, again):
        super().__init__()
        self.again = again
        self.norm = nn.LayerNorm(4)
        inner = nn.Sequential(nn.ReLU(), Leaf(f"{name}.mlp.2.1"))
        self.mlp = nn.Sequential(nn.Linear(4, 4), Leaf(f"{name}.mlp.1"), inner)
        self.experts = Experts({key: Leaf(f"{name}.experts.{key}") for key in ("left", "right")})
        self.register_module("none", None)

    def forward(self, x):
        y = self.norm(x)
        return self.experts(checkpoint(self.mlp, y, use_reentrant=False) if self.again else self.mlp(y))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(f"body.layers.{n}", n == 7) for n in range(23))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.heads = nn.ModuleDict({"first": Leaf("heads.first"), "second": nn.ModuleList([Leaf("heads.second.0")])})
        # A list does not register its modules.
        self.losses = [Leaf("loss")]

    def forward(self, x):
        x = self.heads["second"][0](self.heads["first"](self.body(x)))
        return self.losses[0](x)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self._run(*arguments)

    def _run(self, *arguments):
        return self.module(*arguments)


net = Net()
if sys.argv[1] == "Wrapper":
    model = Wrapper(net)
else:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    model = DistributedDataParallel(net)
kinds = {name: type(module).__name__ for name, module in net.named_modules()}
print(json.dumps(kinds), flush=True)
for line in sys.stdin:
    wanted, _, how = line.rstrip("\n").partition(" ")
    with torch.set_grad_enabled(how == "backward"):
        loss = model(torch.zeros(4)).sum()
    if how == "backward":
        loss.backward()
