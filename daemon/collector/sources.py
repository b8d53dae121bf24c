"""The list of sources: one line each. A source may ask ``Context.find`` for those above it."""

from __future__ import annotations

from probing.daemon.context import SourceType
from probing.daemon.gpu.cuda.source import CudaSource
from probing.daemon.gpu.nvml.source import NvmlSource
from probing.daemon.host.cpu.source import CpuSource
from probing.daemon.host.kernel_log.source import KernelLogSource
from probing.daemon.host.memory import ProcessMemorySource
from probing.daemon.host.node.source import NodeSource, SpaceSource
from probing.daemon.logs.source import LogSource
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.progress import JobProgress
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.net.interfaces.source import InterfaceSource
from probing.daemon.net.rdma.qps import QueuePairs
from probing.daemon.net.rdma.source import RdmaPorts
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.source import StacksOnDemand
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.user_probes.manager import UserProbes

__all__ = ("SOURCES",)

SOURCES: tuple[SourceType, ...] = (
    CollectivesSource,
    JobProgress,
    CudaSource,
    NvmlSource,
    Steps,
    RasWitness,
    FlightRecorderWatch,
    StacksOnDemand,
    PythonSampler,
    VariableWatch,
    LogSource,
    ProcessMemorySource,
    CpuSource,
    NodeSource,
    SpaceSource,
    KernelLogSource,
    TcpSource,
    InterfaceSource,
    RdmaPorts,
    QueuePairs,
    UserProbes,
)
