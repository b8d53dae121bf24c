"""The list of sources: one line each. A source may ask ``Context.find`` for those above it."""

from __future__ import annotations

from probing.daemon.context import SourceType
from probing.daemon.gpu.cuda.source import CudaSource
from probing.daemon.logs.source import LogSource
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.source import StacksOnDemand
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.user_probes.manager import UserProbes

__all__ = ("SOURCES",)

SOURCES: tuple[SourceType, ...] = (
    CollectivesSource,
    CudaSource,
    Steps,
    RasWitness,
    FlightRecorderWatch,
    StacksOnDemand,
    PythonSampler,
    VariableWatch,
    LogSource,
    UserProbes,
)
