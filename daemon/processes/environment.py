"""Reads environment variables of processes from their memory, and lists the names that are read.

/proc/PID/environ has the variables as they were at exec. A program that sets a variable, as Ray Train sets RANK,
changes only the array that libc's ``environ`` points to. A program that sets its title with setproctitle (vLLM, SGLang
and Ray) overwrites the text of /proc/PID/environ, and makes libc's array point to a copy. So libc's array must be read,
too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from probing.api.errors import NotPython
from probing.daemon.processes.loaded_file import Loaded
from probing.daemon.processes.memory import PAGE, Memory, Range
from probing.daemon.processes.procfs import parse_environ

__all__ = ("ALLOWED_NAMES", "read_environ")

# The maximum number of variables of an environment that are read.
MAX_VARIABLES = 16_384
# The maximum number of times that an environment is read if it changes during the read.
ATTEMPTS = 3
# The bytes of each variable that are read at first, to see its name: enough for any name of ALLOWED_NAMES.
_HEAD = 64
_TEXT = 4 * 512 + _HEAD
_SYMBOLS = ("environ", "__environ")
# A line of /proc/PID/maps with the first page of a mapped file.
_BEGIN = re.compile(rb"^([0-9a-f]{1,16})-[0-9a-f]{1,16} r\S+ 0+ \S+ [1-9][0-9]* +(/[^\n]*)$", re.MULTILINE)
_PROGRAM = re.compile(rb"/python[0-9.]*[a-z]*$")
# glibc's libc.so.6 and libc-2.31.so; musl's libc.so, which is its dynamic linker and has that name in most systems.
_LIBC = re.compile(rb"/(?:libc\.so(?:\.6)?|libc-2\.[0-9]+\.so|ld-musl-[^/]+\.so\.1|libc\.musl-[^/]+\.so\.1)$")

_SLURM = (
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
)
_TORCH = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "WORLD_SIZE",
)
_MPI = (
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_JOBID",
    "PMI_RANK",
    "PMI_SIZE",
)
_OTHERS = (
    "HOSTNAME",
    "JAX_COORDINATOR_ADDRESS",
    "JOBSET_NAME",
    "JOB_COMPLETION_INDEX",
    "JOB_NAME",
    "KUBERNETES_SERVICE_HOST",
    "POD_NAME",
    "POD_NAMESPACE",
    "RAY_JOB_ID",
    "VC_TASK_INDEX",
)
_LIBRARIES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_RAS_ADDR",
    "NCCL_RAS_ENABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_TOPO_FILE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# The values of these variables are names, numbers, addresses and switches, none of which is secret.
ALLOWED_NAMES = frozenset((*_SLURM, *_TORCH, *_MPI, *_OTHERS, *_LIBRARIES))


def read_environ(memory: Memory, maps: bytes, program: bytes, names: Collection[str]) -> dict[str, str] | None:
    """Returns the variables in ``names`` as getenv(3) would find them now, with values cut at 512 characters.

    ``maps``: the text of /proc/PID/maps; ``program``: the path of the process's program. Returns None if no ``environ``
    can be read: before libc has started, in a statically linked program, or while ``environ`` changes. Raises the
    errors of ``Memory.read_many``.
    """
    for start in _candidates(maps, program):
        if (at := _address(memory, start)) and (variables := _variables(memory, at, names)) is not None:
            return variables
    return None


def _candidates(maps: bytes, program: bytes) -> list[int]:
    """Returns the start addresses of the files that may define ``environ``: the program, and after it libc.

    If a program refers to ``environ``, the linker gives the program a copy of the variable, which libc uses, too
    (R_*_COPY, System V gABI).
    """
    begins: dict[bytes, int] = {}
    for match in _BEGIN.finditer(maps):
        begins.setdefault(match[2].removesuffix(b" (deleted)"), int(match[1], 16))
    program = program.removesuffix(b" (deleted)")
    programs = [at for path, at in begins.items() if path == program or _PROGRAM.search(path)]
    return [*programs, *(at for path, at in begins.items() if _LIBC.search(path))]


def _address(memory: Memory, start: int) -> int:
    """Returns the address of ``environ`` in the file loaded at ``start``; 0 if the file does not define ``environ``."""
    try:
        loaded = Loaded.at(memory.read_many, start)
    except NotPython:
        return 0
    found = loaded.symbols(memory.read_many, _SYMBOLS)
    return next(iter(found.values())) + loaded.bias if found else 0


def _variables(memory: Memory, at: int, names: Collection[str]) -> dict[str, str] | None:
    wanted = frozenset(name.encode() for name in names)
    for _ in range(ATTEMPTS):
        pointers = _pointers(memory, at)
        if pointers is None:
            return None
        texts = list(_texts(memory, _allowed(memory, pointers, wanted)))
        # If the array was replaced meanwhile, its strings may have been freed and contain anything.
        if _pointers(memory, at) == pointers:
            return parse_environ(b"\0".join(texts), names)
    return None


def _pointers(memory: Memory, at: int) -> list[int] | None:
    """Returns the pointers in the array to which the word at ``at`` points; None if the word points to no array."""
    array = _word(memory.read_many([(at, 8)])[0])
    found: list[int] = []
    while array and len(found) < MAX_VARIABLES:
        size = PAGE - array % PAGE
        page = memory.read_many([(array, size)])[0] if array % 8 == 0 else None
        if page is None:
            return None
        words = memoryview(page).cast("Q").tolist()
        if 0 in words:
            return found + words[: words.index(0)]
        found += words
        array += size
    return found[:MAX_VARIABLES] if array else None


def _allowed(memory: Memory, pointers: list[int], wanted: Collection[bytes]) -> Iterator[int]:
    """Yields the addresses in ``pointers`` that may hold a variable in ``wanted``."""
    heads = [_within_page(pointer, _HEAD) for pointer in pointers]
    for (pointer, size), head in zip(heads, memory.read_many(heads), strict=True):
        name, equals, _ = (head or b"").partition(b"=")
        crosses = size < _HEAD and head is not None and b"\0" not in head
        if name in wanted or (crosses and not equals):
            yield pointer


def _texts(memory: Memory, pointers: Iterator[int]) -> Iterator[bytes]:
    firsts = [_within_page(pointer, _TEXT) for pointer in pointers]
    rests = [(address + size, max(1, _TEXT - size)) for address, size in firsts]
    read = memory.read_many([*firsts, *rests])
    for first, rest in zip(read[: len(firsts)], read[len(firsts) :], strict=True):
        if first is not None:
            yield (first + (rest or b"")).partition(b"\0")[0]


def _within_page(address: int, size: int) -> Range:
    return address, min(size, PAGE - address % PAGE)


def _word(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")
