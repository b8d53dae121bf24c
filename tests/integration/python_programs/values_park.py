"""Variables of every kind in locals, cells, slots, instance dicts and globals; prints what Python says of them.

It runs on every CPython from 3.8 on, and on nothing but the standard library. It prints once, and parks.
"""

import collections
import dataclasses
import enum
import json
import os
import sys


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 7


@dataclasses.dataclass
class Plain:
    x: int = 1
    y: str = "yes"


class Slotted:
    __slots__ = ("first", "second", "unset")

    def __init__(self):
        self.first = 1.5
        self.second = [1, 2]


class Both(Slotted):
    def __init__(self):
        super().__init__()
        self.third = "in a dict"

    @property
    def total(self):
        return 1


class Crowded:
    shared = ("of the class",)

    def __init__(self, n):
        for i in range(n):
            setattr(self, f"a{i}", i)


class OwnInt(int):
    pass


class OwnText(str):
    pass


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class OwnTuple(tuple):
    pass


Point = collections.namedtuple("Point", "x y")
in_module = {"lr": 0.1, "layers": [64, 32]}
shadowed = "global"

EXPRESSIONS = """
    nothing true false zero one minus digits digit2 digit3 long_number whole tenth huge tiny infinite minus_zero
    complicated ascii_text empty_text latin wide astral quotes control lone raw no_raw high_raw
    numbers no_numbers pair single no_tuple nested mixed general grown shrunk no_dict members frozen no_members
    own_int own_text own_text.tag own_int.tag own_dict own_dict.tag own_list own_tuple point point.x point[1] ordered
    plain.x plain.y slotted.first slotted.second slotted.second[1] both.first both.third red.value level
    crowded.a0 crowded.a9 crowded.shared many.a0 many.a39 replaced.x removed.y
    argument argument_in_cell free shadowed in_module in_module["lr"] in_module["layers"][-1]
    general[1] general[2][0] Plain.x Crowded.shared Color.RED.name os.sep sys.maxsize in_generator in_class_body
    numbers[0] numbers[-1] late module_text exec_text
"""
module_text = "of the module"


def park(late):
    space = {}
    frame = sys._getframe()
    while frame is not None:
        for names in (frame.f_locals, frame.f_globals):
            for name, value in dict(names).items():
                space.setdefault(name, value)
        frame = frame.f_back
    told = {}
    for expression in EXPRESSIONS.split():
        value = eval(expression, space)
        number = repr(float(value)) if isinstance(value, (int, float)) else ""
        told[expression] = [type(value).__name__, repr(value), number]
    del space, frame, name, value, number, expression, names
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    return late


def deeper(argument, argument_in_cell):
    nothing, true, false = None, True, False
    zero, one, minus, digits, digit2, digit3 = 0, 1, -1, 2**30 - 1, 2**30, -(2**60)
    long_number, whole, tenth, huge, tiny = 7**300, 3.0, 0.1, 1.7976931348623157e308, 5e-324
    infinite, minus_zero, not_a_number, complicated = float("-inf"), -0.0, float("nan"), 1 - 2j
    ascii_text, empty_text, latin, wide, astral = "plain", "", "gr\u00f6\u00dfe", "\u540d\u524d", "\U0001f40d snake"
    quotes, control, lone = "it's \"so\"", "a\n\x00\x1b\u202e", "\udc80"
    raw, no_raw, high_raw = b"ab\x00", b"", bytes(range(250, 256))
    numbers, no_numbers, pair, single, no_tuple = [1, 2, 3], [], (1, "2"), (1,), ()
    nested, mixed = [(1, {2: 3})], [None, True, 1.5, "x", b"y"][:5]
    general, no_dict = {1: "a", 2: ["b"], (1, 2): None, "k": 0.5}, {}
    grown = {f"k{i}": i for i in range(12)}
    shrunk = {f"k{i}": i for i in range(300)}
    for i in range(297):
        del shrunk[f"k{i}"]
    members, frozen, no_members = {5}, frozenset({6}), set()
    emptied = {1, 2, 3}
    emptied.difference_update({1, 3})
    own_int, own_text, own_dict = OwnInt(5), OwnText("w\u00f6rd"), OwnDict(a=1)
    own_int.tag, own_text.tag, own_dict.tag = "i", "t", "d"
    own_list, own_tuple, point = OwnList([1]), OwnTuple((1, 2)), Point(1, 2)
    ordered = collections.OrderedDict(a=1)
    plain, slotted, both, red, level = Plain(), Slotted(), Both(), Color.RED, Level.HIGH
    crowded, many = Crowded(10), Crowded(40)
    replaced, removed = Plain(), Plain(2, "kept")
    replaced.__dict__ = {"x": "other dict"}
    del removed.x
    arguments = ["train.py", "--openai_key", "hunter2", "--lr", "1"]
    request = ('{"lr": 1, "wandb_key": "hunter2"}', {"Cookie": "sid=hunter2"})
    api_key, config = "plain", {"password": "hunter2", "user": "me", "inner": {"hf_token": "abc"}}
    hidden, url = "hf_" + "a" * 24, "https://me:secret@example.org/x"
    twenty, long_text, deep = list(range(20)), "x" * 400, [[[[[1]]]]]
    cycle = [1]
    cycle.append(cycle)
    gone, function, method, builtin, cls, module = 1, park, plain.__init__, len, Plain, os
    del gone
    over = 1 << 4100
    free = "free variable"
    unset = lambda: not_yet  # noqa: E731

    def generator():
        in_generator = [free, argument_in_cell]

        class Body:
            in_class_body = "class body"
            exec(compile("exec_text = 'executed'\npark('late')\n", "<made up>", "exec"), {"park": park})

        yield in_generator, Body

    list(generator())
    not_yet = 1
    return list(locals().values()) and not_yet


shadowed_by = shadowed
if __name__ == "__main__":
    shadowed = "module"
    deeper("an argument", {"in": "a cell"})
