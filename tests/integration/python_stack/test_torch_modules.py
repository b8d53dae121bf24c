"""Names of torch modules that run, against what torch says of them itself; and modules that are hostile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from python_stack_helpers import child, each_interpreter, program, runtime_of

from probing.daemon.python_stack.torch_modules.look import look
from probing.daemon.python_stack.walk.threads import read_start_ns

# Modules as torch makes them, for interpreters without torch.
FAKE = """
import sys
class Module:
    def __init__(self, **children):
        self.training = True
        self._modules = children
    def __call__(self, *arguments):
        return self._call_impl(*arguments)
    def _call_impl(self, *arguments):
        def inner():
            return self.forward(*arguments)
        return inner()
    def forward(self, x=None):
        return [self._modules[name](x) for name in self._modules]
class List(Module):
    def __iter__(self):
        return iter(self._modules.values())
class Net(Module):
    def __init__(self, work=None, **children):
        Module.__init__(self, **children)
        self.work = work
    def forward(self, x=None):
        return self.work() if self.work else Module.forward(self)
class Leaf(Module):
    def forward(self, x=None):
        print("stopped", flush=True)
        sys.stdin.readline()
"""


class Looks:
    """Looks at the modules of the main thread of a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._start_ns = read_start_ns(process.pid)
        self._runtime = runtime_of(process.pid)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def go_on(self) -> None:
        """Lets the program go on to where it stops next."""
        self.tell("on")
        self.stopped()

    def stopped(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "stopped\n"

    def look(self) -> dict[str, Any]:
        pid = self._process.pid
        answer = look(pid, self._start_ns, self._runtime, pid, time.monotonic() + 60)
        return dict(json.loads(json.dumps(answer)))  # as it comes from a reader

    def at(self, line: str) -> dict[str, Any]:
        """Returns what is seen where the program stops after ``line``."""
        self.tell(line)
        self.stopped()
        answer = self.look()
        self.tell("on")
        return answer


@contextmanager
def fake(python: str, code: str) -> Iterator[Looks]:
    """A process that runs ``code`` after FAKE, and has stopped."""
    with child(python, "-u", "-c", FAKE + code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        yield Looks(process)


@pytest.mark.parametrize("wrapper", ["Wrapper", "DistributedDataParallel"])
def test_names_are_those_of_torch(tmp_path: Path, wrapper: str) -> None:
    with program(sys.executable, "torch_modules.py", wrapper, str(tmp_path / "meet")) as process:
        assert process.stdout is not None
        kinds = json.loads(process.stdout.readline())
        looks = Looks(process)
        leaves = [name for name, kind in kinds.items() if kind == "Leaf"]
        seen = {name: looks.at(name) for name in leaves}
        first, again = (looks.at("body.layers.7.mlp.1 backward"), looks)
        again.stopped()
        recomputed = again.look()
    assert len(leaves) == 4 * 23 + 2
    for name, answer in seen.items():
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        running = [[path, kinds[path]] for path in above if kinds[path] not in ("ModuleList", "ModuleDict")]
        assert [module[1:] for module in answer["modules"]] == [["Net", wrapper], ["Net", "Net"], *running]
        assert {module[0] for module in answer["modules"]} == {"Net"}
        assert answer["stage"] == "forward"
    assert first["stage"] == "forward"
    # The block is computed again: nobody on the stack has called it.
    assert recomputed["stage"] == "backward"
    assert recomputed["modules"] == [
        ["Net", "body.layers.7.mlp", "Sequential"],
        ["Net", "body.layers.7.mlp.1", "Leaf"],
    ]


def test_a_module_that_is_not_registered_is_a_model_of_its_own(tmp_path: Path) -> None:
    with program(sys.executable, "torch_modules.py", "Wrapper", str(tmp_path / "meet")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        answer = Looks(process).at("loss")
    assert answer["modules"] == [["Net", "Net", "Wrapper"], ["Net", "Net", "Net"], ["Leaf", "Leaf", "Leaf"]]


LAYERS = """
class Body(Module):
    def forward(self, x=None):
        return [layer(x) for layer in self._modules["layers"]]
class Parallel(Module): pass
class Compiled(Module): pass
body = Body(layers=List(**{str(n): Module(mlp=Leaf()) for n in range(5)}))
Parallel(module=Compiled(_orig_mod=Net(body=body)))()
"""


@each_interpreter
def test_modules_of_each_interpreter(python: str) -> None:
    with fake(python, LAYERS) as looks:
        seen = [looks.look()]
        for _ in range(4):
            looks.go_on()
            seen.append(looks.look())
        again = looks.look()
    for number, answer in enumerate(seen):
        assert answer["stage"] == "forward"
        assert answer["modules"] == [
            ["Net", "Net", "Parallel"],
            ["Net", "Net", "Compiled"],
            ["Net", "Net", "Net"],
            ["Net", "body", "Body"],
            ["Net", f"body.layers.{number}", "Module"],
            ["Net", f"body.layers.{number}.mlp", "Leaf"],
        ]
    assert again["modules"] == seen[-1]["modules"]
    # What is known is only compared.
    assert again["reads"] < seen[0]["reads"]


@each_interpreter
def test_stages(python: str) -> None:
    code = """
def backward():
    Leaf.forward(None)
class Block(Module): pass
net = Net(layers=List(a=Block(b=Leaf()), c=Block(d=Leaf())))
net()
backward()
class Deep(Leaf):
    def backward(self):
        net._modules["layers"]._modules["c"]()
Deep().backward()
Leaf.forward(None)
Leaf.forward(7)
"""
    with fake(python, code) as looks:
        answers = [looks.look()]
        for _ in range(5):
            looks.go_on()
            answers.append(looks.look())
    seen = [(answer["stage"], [module[1] for module in answer["modules"]]) for answer in answers]
    assert seen == [
        ("forward", ["Net", "layers", "layers.a", "layers.a.b"]),
        ("forward", ["Net", "layers", "layers.c", "layers.c.d"]),
        ("backward", []),
        # Computed again in the backward pass, without a caller on the stack.
        ("backward", ["layers.c", "layers.c.d"]),
        ("other", []),
        ("other", []),
    ]


@each_interpreter
def test_another_thread_that_computes_modules_again_counts_in_the_backward_pass(python: str) -> None:
    code = """
import threading
net = Net(a=Module(b=Leaf()))
net()
def backward():
    thread = threading.Thread(target=net._modules["a"])
    thread.start()
    thread.join()
backward()
thread = threading.Thread(target=net)
thread.start()
thread.join()
"""
    with fake(python, code) as looks:
        looks.look()
        looks.go_on()
        again = looks.look()
        looks.go_on()
        elsewhere = looks.look()
    assert (again["stage"], again["modules"]) == ("backward", [["Net", "a", "Module"], ["Net", "a.b", "Leaf"]])
    assert (elsewhere["stage"], elsewhere["modules"]) == ("other", [])


@each_interpreter
def test_modules_that_are_replaced_get_their_new_names(python: str) -> None:
    code = """
net = Net(a=Leaf(), b=Leaf())
net()
# The same objects under other names, in dicts that lie elsewhere.
net._modules = {"c": net._modules["b"], "d": net._modules["a"]}
net()
children = net._modules
for name in ("c", "d"):
    children[name + "2"] = children.pop(name)
net()
# The model gets a wrapper when it has already run.
class Parallel(Module): pass
Parallel(module=net)()
"""
    with fake(python, code) as looks:
        names = [looks.look()["modules"]]
        for _ in range(7):
            looks.go_on()
            names.append(looks.look()["modules"])
    assert [modules[-1][1] for modules in names] == ["a", "b", "c", "d", "c2", "d2", "c2", "d2"]
    assert [[module[2] for module in modules] for modules in names] == [["Net", "Leaf"]] * 6 + [
        ["Parallel", "Net", "Leaf"]
    ] * 2
    assert {module[0] for modules in names for module in modules} == {"Net"}


def shown(*names: str) -> str:
    """The path of ``names`` as it is shown."""
    path = ".".join(names)
    return path if len(path) <= 512 else path[:511] + "…"


# Models that stop, and the (model, path) of each module that is seen then.
HOSTILE = {
    "many children": (
        """
net = Net(lambda: leaf(), **{str(n): Module() for n in range(100_000)})
net._modules["last"] = leaf = Leaf()
net()
""",
        [("Net", "Net"), ("Leaf", "Leaf")],
    ),
    "many attributes": (
        """
leaf = Leaf()
modules = leaf.__dict__.pop("_modules")
for n in range(100_000):
    setattr(leaf, f"a{n}", n)
leaf._modules = modules
leaf()
""",
        [],
    ),
    "a cycle": (
        """
net = Net(lambda: leaf())
net._modules.update(itself=net, other=Module(net=net), leaf=7)
net._modules["other"]._modules["other"] = net._modules["other"]
leaf = Leaf()
net()
""",
        [("Net", "Net"), ("Leaf", "Leaf")],
    ),
    "a model that calls itself": (
        """
import itertools
count = itertools.count()
net = Net(lambda: net._modules["b"]() if next(count) < 3 else Leaf.forward(None))
net._modules["b"] = Net(lambda: net())
net()
""",
        [("Net", "Net"), *[("Net", "b"), ("Net", "Net")] * 3],
    ),
    "names with escapes": (
        r"""
Module(**{"\x1b[2J\n\u202e\udc80": Module(**{"x" * 1000: Leaf()})})()
""",
        [
            ("Module", "Module"),
            ("Module", r"\x1b[2J\n\u202e\udc80"),
            ("Module", r"\x1b[2J\n\u202e\udc80." + "x" * 127 + "…"),
        ],
    ),
    "names that are no texts": (
        """
net = Net(lambda: leaf())
net._modules = {7: Leaf(), None: 7, (): net}
leaf = net._modules[7]
net()
""",
        [("Net", "Net"), ("Leaf", "Leaf")],
    ),
    "children that are no modules": (
        """
net = Net(lambda: leaf(), a=7, b=None, c="text", d=print, e=Module, f={}, leaf=Leaf())
leaf = net._modules["leaf"]
net()
""",
        [("Net", "Net"), ("Net", "leaf")],
    ),
    "no dict of modules": (
        """
leaf = Leaf()
leaf._modules = [leaf]
leaf()
""",
        [],
    ),
    "no dict of attributes": (
        """
class Slotted:
    __slots__ = ("_modules",)
    forward = Leaf.forward
slotted = Slotted()
slotted._modules = {}
slotted.forward()
""",
        [],
    ),
    "a deep model": (
        """
sys.setrecursionlimit(10_000)
net = Leaf()
for n in range(200):
    net = Module(**{"x" * 100: net})
net()
""",
        [("Module", "Module"), *(("Module", shown(*["x" * 100] * n)) for n in range(1, 64))],
    ),
    "a deep model whose containers do not run": (
        """
leaf = net = Leaf()
for n in range(200):
    net = Module(x=net)
Net(lambda: leaf(), x=net)()
""",
        [("Net", "Net"), ("Leaf", "Leaf")],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_modules(name: str) -> None:
    code, expected = HOSTILE[name]
    with fake(sys.executable, code) as looks:
        answer = looks.look()
        again = looks.look()
    assert [(model, path) for model, path, _ in answer["modules"]] == expected
    assert all(text.isprintable() for module in answer["modules"] for text in module)
    assert answer["bytes"] < 4 << 20
    assert again["modules"] == answer["modules"]
    assert again["reads"] <= answer["reads"]
