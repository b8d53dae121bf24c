"""Threads that are each stopped in another shape of Python code; prints as JSON what the interpreter says of them.

It runs on every CPython from 3.8 on, and on nothing but the standard library. A line is printed for each line read.
"""

import asyncio
import contextlib
import ctypes
import functools
import json
import os
import sys
import tempfile
import threading

ARRIVED_R, ARRIVED_W = os.pipe()
NEVER_R, NEVER_W = os.pipe()
NATIVE = {}


def park(*_):
    # One line: a thread that has arrived but does not wait yet is at the same line. Both calls are C functions.
    os.write(ARRIVED_W, b"x"), os.read(NEVER_R, 1)
    return 0


def check_long(code):
    table = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
    if len(table) <= 4096:
        os.abort()


def plain():
    before = 1
    park(
        before,
        2,
    )


def generator():
    def numbers():
        yield 1
        try:
            yield park()
        finally:
            before = 2
        yield before

    def outer():
        yield from numbers()

    return list(outer())


def coroutine():
    async def inner():
        async with Manager():
            park()

    async def outer():
        await asyncio.sleep(0)
        await asyncio.gather(inner())

    asyncio.run(outer())


class Manager:
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    def __enter__(self):
        park()

    def __exit__(self, *_):
        return None

    @property
    def value(self):
        return park()

    def __getattr__(self, name):
        return park() if name == "missing" else None

    @classmethod
    def made(cls):
        return cls().value

    @staticmethod
    def twice(n):
        return [park() if i == n else i for i in range(2 * n)]


def manager():
    with Manager():
        pass


def recursion(n=300):
    if n == 0:
        return park()
    return recursion(n - 1)


def comprehension():
    return {key: [park() for _ in range(1)] for key in "abc" if key != "a"}


def generator_expression():
    return sum(park() or i for i in range(3))


def class_body():
    class Outer:
        before = 1

        class Inner:
            after = park()

    return Outer


def executed():
    exec(compile("x = 1\n\n\ndef f():\n    return park()\n\n\nf()\n", "<made up>", "exec"), {"park": park})


def evaluated():
    return eval("[park()\n\n for _ in [1]]", {"park": park})


def callback_sort():
    return sorted([3, 1, 2], key=lambda n: park() if n == 1 else n)


def callback_ctypes():
    qsort = ctypes.CDLL(None).qsort
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: park())
    qsort((ctypes.c_int * 2)(2, 1), 2, 4, compare)


def callback_reduce():
    return functools.reduce(lambda a, b: park(), map(int, [1, 2]))


def in_del():
    class Dying:
        def __del__(self):
            park()

    dying = Dying()
    del dying


def in_except():
    try:
        raise ValueError("expected")
    except ValueError:
        try:
            park()
        finally:
            pass


def naïve_größe_名前():
    def 内側():
        return park()

    return 内側()


def long_name():
    name = "n" * 2000
    space = {"park": park}
    exec(compile("def " + name + "():\n    return park()\n" + name + "()\n", "/nowhere/" + "d" * 3000, "exec"), space)


def wide_file_name():
    exec(compile("park()", "/tmp/\U0001f40d-\u0436-\udc80.py", "exec"), {"park": park})


def long_table():
    lines = ["def f(n):"]
    lines += ["    n = n + 1" if i % 3 else "\n    n = (n\n         + 1)" for i in range(3000)]
    lines += ["    park()", "    return n", "f(0)"]
    code = compile("\n".join(lines), "<long>", "exec")
    check_long(next(c for c in code.co_consts if hasattr(c, "co_code")))
    exec(code, {"park": park})


def big_jump():
    source = "def f():\n    x = 1\n" + "\n" * 100000 + "    park()\n    return x\nf()\n"
    exec(compile(source, "<jump>", "exec"), {"park": park})


def backwards():
    # The call's line is before the lines of its arguments, and after them in the table.
    return (park)(
        [
            1,
        ][0],
    )


def imported():
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/parking_module.py", "w") as file:
            file.write('"""Doc."""\nimport shapes_park\n\nshapes_park.park()\n')
        sys.path.insert(0, folder)
        sys.modules["shapes_park"] = sys.modules["__main__"]
        __import__("parking_module")


def decorated():
    def twice(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) + function(*args)

        return wrapper

    @twice
    @functools.lru_cache(maxsize=None)  # noqa: UP033
    def parked(n):
        return park() + n

    return parked(1)


def decorator_runs():
    def parking(function):
        park()
        return function

    @parking
    @functools.wraps(park)
    def unused():
        pass


def class_hooks():
    class Meta(type):
        def __call__(cls, *args):
            return super().__call__(*args)

    class Base(metaclass=Meta):
        def __init_subclass__(cls, **options):
            cls.found = options

        def __init__(self, n):
            self.n = park(n)

    class Derived(Base, wanted=1):
        def __init__(self):
            super().__init__(2)

    return Derived()


def async_generator():
    async def numbers():
        for i in range(3):
            yield i
            await asyncio.sleep(0)
            park()

    async def outer():
        return [i async for i in numbers() if i < 2]

    asyncio.run(outer())


def awaits(n=40):
    async def deep(n):
        if n:
            await deep(n - 1)
        else:
            park()

    asyncio.run(deep(n))


def task_callback():
    async def outer():
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: park())
        await asyncio.sleep(9999)

    asyncio.run(outer())


def generator_send():
    def echo():
        got = None
        while True:
            got = yield got
            if got == 2:
                park()

    first = echo()
    next(first)
    first.send(1)
    first.send(2)


def generator_throw():
    def patient():
        try:
            yield 1
        except ValueError:
            park()

    one = patient()
    next(one)
    one.throw(ValueError("expected"))


def generator_chain(n=30):
    def links(n):
        if n:
            yield from links(n - 1)
        else:
            yield park()

    return next(links(n))


def through_c(n=20):
    # Each level is a call of Python from C from Python.
    return sorted([n], key=lambda n: park() if n == 0 else through_c(n - 1) or 0)


def comparison():
    class Odd:
        def __eq__(self, other):
            return bool(park())

        def __hash__(self):
            return 1

    return {Odd(): 1, Odd(): 2}


def nested_comprehensions():
    return [{(i, j) for j in range(2) if not park()} for i in range(2)]


def lambda_default():
    return (lambda a, b=lambda: park(): b() + a)(1)


def context_manager():
    @contextlib.contextmanager
    def managed():
        park()
        yield 1

    with managed() as one:
        return one


def executed_twice():
    space = {"park": park}
    exec("exec('def inner():\\n  class C:\\n    x = [park() for _ in (1,)]\\n\\n\\ninner()')", space)


def partial_call():
    return functools.partial(lambda *a, **k: park(), 1, key=2)()


def wide_table():
    # Over 4,096 bytes of line table in one expression, and the call in the middle of it.
    terms = ["y +\\\n(y + y *\ny)"] * 700
    terms[500] = "y +\\\npark()"
    code = compile("x = (\n" + " +\n".join(terms) + "\n)\n", "<wide>", "exec")
    check_long(code)
    exec(code, {"park": park, "y": 1})


def one_line():
    before = park(); before += 1; return before  # noqa: E702


SHAPES = [
    decorated,
    decorator_runs,
    class_hooks,
    async_generator,
    awaits,
    task_callback,
    generator_send,
    generator_throw,
    generator_chain,
    through_c,
    comparison,
    nested_comprehensions,
    lambda_default,
    context_manager,
    executed_twice,
    partial_call,
    wide_table,
    one_line,
    plain,
    generator,
    coroutine,
    Manager.made,
    lambda: Manager.twice(2),
    lambda: Manager().missing,
    manager,
    recursion,
    comprehension,
    generator_expression,
    class_body,
    executed,
    evaluated,
    callback_sort,
    callback_ctypes,
    callback_reduce,
    in_del,
    in_except,
    naïve_größe_名前,
    long_name,
    wide_file_name,
    long_table,
    big_jump,
    backwards,
    imported,
]


def in_thread(shape):
    NATIVE[threading.get_ident()] = threading.get_native_id()
    shape()


def stack(frame):
    found = []
    while frame is not None:
        code = frame.f_code
        found.append([getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno])
        frame = frame.f_back
    return found


def report():
    for _ in range(len(SHAPES) + 1):
        os.read(ARRIVED_R, 1)
    for _ in sys.stdin:
        frames = sys._current_frames()
        print(json.dumps({NATIVE[i]: stack(f) for i, f in frames.items() if i in NATIVE}), flush=True)


NATIVE[threading.get_ident()] = threading.get_native_id()
threading.Thread(target=report, name="report").start()
for one in SHAPES:
    threading.Thread(target=in_thread, args=(one,), daemon=True).start()
recursion(20)
