"""A rank with modules as torch makes them: rank 0 stands in the forward of one of them, rank 1 in the backward pass."""

import os
import sys
import time


class Module:
    def __init__(self, **children):
        self._modules = children

    def __call__(self):
        return self._call_impl()

    def _call_impl(self):
        return self.forward()

    def forward(self):
        for child in self._modules.values():
            child()


class List(Module):
    """A container, whose code does not run."""


class Mlp(Module):
    def forward(self):
        stand()


class Net(Module):
    def forward(self):
        for layer in self._modules["layers"]._modules.values():
            layer()


class Parallel(Module):
    """A wrapper."""


def backward():
    stand()


def stand():
    open(sys.argv[1], "w").close()
    time.sleep(9999)


layers = {str(number): Module() for number in range(23)}
layers["3"] = Module(mlp=Mlp())
if os.environ["RANK"] == "1":
    backward()
Parallel(module=Net(layers=List(**layers)))()
