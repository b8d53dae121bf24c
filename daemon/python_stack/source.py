"""The source of stacks and variables on demand. Other sources of this package share its stacks and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa

from probing.daemon.clock import ClockPair
from probing.daemon.context import Context
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.parsers import ParserPools
from probing.daemon.processes.ranking import ModuleState
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.answers import StackAnswers
from probing.daemon.python_stack.native.requests import NativeStacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.modules import module_state
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.source import Identity, Source
from probing.diagnosis.facts import Frame, Thread
from probing.diagnosis.training_threads import training_threads

__all__ = ("StacksOnDemand",)


class StacksOnDemand(Source):
    """The source of stacks and variables on demand. Thread-safe."""

    name = "python_stack"

    def __init__(self, readers: ReaderPool, parsers: ParserPools, processes: Discovery, node: str) -> None:
        self.stacks = PythonStacks(readers, parsers.stacks)
        self.values = Values(readers, self.stacks.prepare)
        native = NativeStacks(readers, parsers.stacks, self.stacks.prepare)
        self.answers = StackAnswers(node, processes, self.stacks, native, self.values)

    @classmethod
    def make(cls, context: Context) -> StacksOnDemand:
        made = cls(context.readers, context.parsers, context.processes, context.node)
        # The other sources of this package read processes through these stacks.
        context.share(made.stacks)
        context.share(made.values)
        return made

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"python.backtrace": lambda pair: self.answers.backtrace(pair.real_ns)}

    def module_state(self, pid: int, start_ns: int) -> ModuleState | None:
        """Returns the rank from the state of a process's Python modules (``values.modules``); None if the modules do
        not show the rank.
        """
        return module_state(self.values, pid, start_ns)

    def runs_python(self, pid: int, start_ns: int, tid: int) -> bool:
        """Returns whether a thread has Python frames now. Raises ProbingError if they cannot be read."""
        threads, failures = self.stacks.stacks([(pid, start_ns)])
        for thread in threads:
            if thread["tid"] == tid:
                return bool(thread["frames"])
        if failures:
            raise failures[0].error
        return False

    def training_threads(self, targets: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Returns the thread that trains, for each process whose stacks show that its main thread does not train."""
        threads: dict[tuple[int, int], list[Thread]] = {}
        for read in self.stacks.stacks(targets)[0]:
            frames = tuple(Frame(frame["func"], frame["file"], frame["lineno"]) for frame in read["frames"])
            main = read["tid"] == read["pid"]
            thread = Thread(read["tid"], read["thread"] or "", main, read["state"], read["gil"], frames)
            threads.setdefault((read["pid"], read["start_ns"]), []).append(thread)
        return {key: thread.tid for key, thread in training_threads(threads).items()}

    def stop(self) -> None:
        self.answers.close()
        self.values.close()
        self.stacks.close()

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self.stacks.forget(pid, start_ns)

    def process_exited(self, process: Identity) -> None:
        self.stacks.forget(process.pid, process.start_ns)
