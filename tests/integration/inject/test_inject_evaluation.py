"""Code run in real processes of each CPython: its results, what is left, and that the process goes on as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from inject_helpers import asked, beats, busy, evaluated, regions
from long import LONG
from python_stack_helpers import each_interpreter, read_mappings
from waiting import until

from probing.api.errors import ProcessGone, TargetTimeout, UsageError
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.inject.evaluation import MAX_CODE, Evaluation, evaluate
from probing.daemon.processes.memory import ProcessMemory

pytestmark = pytest.mark.timeout(1800 if LONG else 120)

KINDS = ("threads", "forks", "signals")
# A prime, so that no count is right by accident.
TIMES = 1009 if LONG else 23


@each_interpreter
def test_evaluations_beside_threads_forks_and_signals(python: str) -> None:
    with busy(python, *KINDS) as process:
        before, steps = _files(process.pid), []
        # The functions are looked up once, as the parser's cache does.
        request = asked(process.pid, "1")
        for number in range(TIMES):
            found = evaluate(request._replace(code=f"[step, {number} * 2, wrong]"))
            assert found["type"] == "list", found
            step, double, wrong = json.loads(found["value"])
            assert (double, wrong) == (number * 2, [])
            steps.append(step)
        assert steps == sorted(steps)
        beats(process)
        assert regions(process.pid) == []
        # The program itself opens files, for its warnings, and closes them.
        until(lambda: _files(process.pid) <= before, what="no file that is left open")
        names = "[name for name in [*__import__('sys').modules, *dir()] if name.startswith('probing')]"
        assert evaluated(process.pid, names)["value"] == "[]"


def _files(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(path.readlink()))
    return found


# Destructors run after the answer, while the pending call that ran the code goes on.
SLOW_END = "kind = type('Slow', (), {'__del__': staticmethod(compute)})\nobjects = [kind() for _ in range(3001)]"
# The object waits for a byte in a pipe.
HELD = """
ends = os.pipe()
print(ends[1])
held = type('Held', (), {'__del__': staticmethod(__import__('functools').partial(os.read, ends[0], 1))})()
"""


@pytest.mark.parametrize("kinds", [(), ("signals",)])
@each_interpreter
def test_code_begins_when_the_call_of_the_code_before_is_over(python: str, kinds: tuple[str, ...]) -> None:
    with busy(python, *kinds) as process:
        assert "error" not in evaluated(process.pid, SLOW_END)
        assert evaluated(process.pid, "'next'")["value"] == "'next'"
        beats(process)
        # AND WHEN its time is over before that
        held = evaluated(process.pid, HELD, 0.5)
        assert "error" not in held
        with pytest.raises(TargetTimeout, match="code of an earlier request still runs"):
            evaluated(process.pid, "'too early'")
        Path(f"/proc/{process.pid}/fd/{int(held['output'])}").write_bytes(b"x")
        beats(process)
        assert evaluated(process.pid, "'later'")["value"] == "'later'"
        beats(process)


@each_interpreter
def test_values_output_and_exceptions(python: str) -> None:
    with busy(python) as process:
        pid = process.pid
        assert evaluated(pid, "{'a': step > 0}")["value"] == "{'a': True}"
        assert "value" not in evaluated(pid, "None")
        printed = evaluated(pid, "import sys\nprint('one')\nprint('two', file=sys.stderr)\nmine = 5")
        assert (printed["output"], printed.get("value")) == ("one\ntwo\n", None)
        assert "error" not in printed
        assert evaluated(pid, "mine")["error"]["type"] == "NameError"
        inner = evaluated(pid, "def f(n):\n    return 1 // n\nf(0)")["error"]
        assert inner["type"] == "ZeroDivisionError"
        assert inner["frames"] == [("<eval>", 3, "<module>"), ("<eval>", 2, "f")]
        assert evaluated(pid, "int('x')")["error"]["message"].startswith("invalid literal")
        beats(process)


@each_interpreter
def test_bad_code_harms_nothing(python: str) -> None:
    with busy(python) as process:
        pid = process.pid
        raised = {
            "while True: pass": "TimeoutError",
            "def f():\n while True: len('')\nf()": "TimeoutError",
            # A function of another file, which calls no other.
            "exec(compile('def g():\\n while True:\\n  x = 1', 'lib.py', 'exec'))\ng()": "TimeoutError",
            # Only the text of the value, or of the exception, never ends.
            "type('Slow', (), {'__repr__': lambda self: [0 for _ in iter(int, 1)]})()": "TimeoutError",
            "raise type('Slow', (Exception,), {'__str__': lambda self: [0 for _ in iter(int, 1)]})()": "TimeoutError",
            "def f(): f()\nf()": "RecursionError",
            "raise SystemExit(3)": "SystemExit",
            "exit(3)": "SystemExit",
            "1 +": "SyntaxError",
            "raise BaseException('b')": "BaseException",
            "import nothing_of_that_name": "ModuleNotFoundError",
        }
        for code, error in raised.items():
            found = evaluated(pid, code, 1.0 if error == "TimeoutError" else 30.0)
            assert found["error"]["type"] == error, (code, found)
        many = evaluated(pid, "for _ in range(100): print('x' * 10_000)")
        assert (len(many["output"]), many["dropped"]) == (256 << 10, 100 * 10_001 - (256 << 10))
        assert len(evaluated(pid, "'x' * 10**8")["value"]) < (64 << 10) + 10
        assert evaluated(pid, "list(range(10**6))")["value"].endswith("(1000000 items)")
        assert "raised" in evaluated(pid, "type('Odd', (), {'__repr__': lambda self: 1 // 0})()")["value"]
        assert evaluated(pid, "__import__('sys').stdout is __import__('sys').__stdout__")["value"] == "False"
        assert evaluated(pid, "__import__('sys').gettrace() is None")["value"] == "False"
        beats(process)
        assert regions(pid) == []


@each_interpreter
def test_the_process_ends_while_it_runs_the_code(python: str) -> None:
    with busy(python) as process:
        with pytest.raises(ProcessGone, match="ended"):
            evaluated(process.pid, "__import__('os')._exit(7)")
        assert process.wait(30) == 7


@each_interpreter
def test_a_generator_of_the_program_is_not_traced_afterwards(python: str) -> None:
    with busy(python) as process:
        made = "import __main__\nexec(compile('def g():\\n while True: yield 1', 'lib.py', 'exec'), __main__.__dict__)"
        assert "error" not in evaluated(process.pid, f"{made}\n__main__.steps = __main__.g()")
        assert evaluated(process.pid, "next(steps), steps.gi_frame.f_trace")["value"] == "(1, None)"


def test_a_function_that_the_code_leaves_behind_keeps_its_names() -> None:
    with busy(sys.executable) as process:
        code = "import __main__\nbase = 20\ndef added(n): return base + n\n__main__.added = added"
        assert "error" not in evaluated(process.pid, code)
        assert evaluated(process.pid, "added(1)")["value"] == "21"


def test_nothing_stays_even_without_the_garbage_collector() -> None:
    with busy(sys.executable) as process:
        evaluated(process.pid, "import gc; gc.collect(); gc.disable()")
        count = "sum(type(each).__name__ == 'function' for each in __import__('gc').get_objects())"
        first = [int(evaluated(process.pid, count)["value"]) for _ in range(3)][-1]
        for _ in range(20):
            evaluated(process.pid, "def f(): return 1\nf()")
        assert int(evaluated(process.pid, count)["value"]) - first < 20


def test_nothing_is_put_into_a_process_whose_main_thread_sits_in_c() -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(TargetTimeout, match="it waited in C"):
            evaluated(process.pid, "1", 0.5)
        assert regions(process.pid) == []
        process.kill()


def test_code_that_python_does_not_get_to_is_withdrawn() -> None:
    """The call is one of a function that adds nothing, as a full queue of pending calls does."""
    with busy(sys.executable) as process:
        request = asked(process.pid, "print('never')", 0.5)
        add = request.functions["add_pending_call"]
        [mapping] = [m for m in read_mappings(process.pid) if m.start <= add < m.end]
        with open(mapping.path, "rb") as file:
            symbols = {
                s.name: s.address for s in find_symbols(file.fileno(), ["Py_AddPendingCall", "Py_IsInitialized"])
            }
        other = add - symbols["Py_AddPendingCall"] + symbols["Py_IsInitialized"]
        with pytest.raises(TargetTimeout, match="was withdrawn"):
            evaluate(request._replace(functions={**request.functions, "add_pending_call": other}))
        [left] = regions(process.pid)
        start = int(left.partition("-")[0], 16) + (1 << 20)
        assert ProcessMemory(process.pid).read_many([(start, 6)]) == [b"if 0:\n"]
        beats(process)
        assert evaluated(process.pid, "1")["value"] == "1"


def test_requests_without_sense_are_refused() -> None:
    with busy(sys.executable) as process:
        good = asked(process.pid, "1")._asdict()
        for change in (
            {"code": "x" * (MAX_CODE + 1)},
            {"seconds": 0},
            {"seconds": float("nan")},
            {"pid": "x"},
            {"start_ns": 0},
            {"functions": {}},
            {"functions": {**good["functions"], "add_pending_call": 4096}},
        ):
            with pytest.raises(UsageError):
                evaluate(Evaluation.from_dict({**good, **change}))
        beats(process)
