"""What no row of the big scene of ``tests/e2e/test_columns.py`` fills, and what does.

A column that nothing fills does not exist: it goes, or it is filled. What stands here needs what a machine of the tests
lacks; the test of its source fills it from recorded or made-up data. ``tests/unit/test_filled_columns.py`` looks
whether that test is there and knows the columns.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ELSEWHERE", "METRICS_ELSEWHERE", "NEVER", "Elsewhere")


class Elsewhere(NamedTuple):
    """Of ``columns`` (none: all of the table) values are checked in ``test``; the scene lacks ``needs``."""

    test: str
    needs: str
    columns: tuple[str, ...] = ()


_NVML = "tests/integration/gpu/test_nvml.py"
_LIMITS = "control groups with limits, as of containers"
_GROUPS = "tests/e2e/test_groups.py"
ELSEWHERE: dict[str, tuple[Elsewhere, ...]] = {
    "cluster.groups": (Elsewhere(_GROUPS, "a group of workers"),),
    "cluster.members": (
        Elsewhere("tests/integration/service/test_service_gossip.py", "several nodes of one name", ("problem",)),
    ),
    "cluster.workers": (Elsewhere(_GROUPS, "a launcher"),),
    "comm.communicators": (
        Elsewhere(
            "tests/kernel/test_nccl_communicators.py",
            "NCCL that splits a communicator, and fails",
            ("async_error", "color", "parent"),
        ),
    ),
    "comm.progress": (
        Elsewhere("tests/unit/nccl_uprobes/test_progress.py", "a job with the label phase", ("phase", "phase_since")),
    ),
    "comm.ras": (Elsewhere("tests/unit/nccl_uprobes/test_ras_report.py", "NCCL with RAS on GPUs"),),
    "cpu.utilization": (Elsewhere("tests/unit/host/test_cpu_source.py", _LIMITS, ("cpu_quota",)),),
    "cuda.launches": (Elsewhere("tests/kernel/test_cuda_calls.py", "libcuda"),),
    "cuda.memory": (Elsewhere("tests/kernel/test_cuda_calls.py", "a program that allocates by libcudart"),),
    "gpu.devices": (
        Elsewhere(
            _NVML,
            "a GPU in MIG mode, in an NVLink fabric, and lost",
            (
                *("compute_instance", "gpu_instance", "mig", "parent_uuid", "sm_count"),
                *("fabric_clique", "fabric_cluster", "reason"),
            ),
        ),
    ),
    "gpu.events": (
        Elsewhere(
            "tests/integration/gpu/test_nvml_failures.py",
            "a GPU in MIG mode, and one with errors of memory",
            ("compute_instance", "gpu_instance", "value"),
        ),
    ),
    "gpu.processes": (
        Elsewhere(
            _NVML, "samples of the driver by process", ("decoder_pct", "encoder_pct", "mem_pct", "mig", "sm_pct")
        ),
    ),
    "gpu.utilization": (
        Elsewhere(
            _NVML,
            "a GPU in MIG mode, and one before Ampere, which retires pages",
            ("mig", "retired_pages_dbe", "retired_pages_sbe", "retirement_pending"),
        ),
    ),
    "host.disk": (Elsewhere("tests/unit/host/test_node_source.py", "kernel.task_delayacct", ("io_delay_ns",)),),
    "host.file_systems": (
        Elsewhere("tests/unit/host/test_node_source.py", "a container", ("job", "pid", "rank", "run", "start_ns")),
    ),
    "host.memory": (Elsewhere("tests/unit/host/test_node_source.py", _LIMITS, ("high_bytes", "job", "run")),),
    "host.pressure": (Elsewhere("tests/unit/host/test_node_source.py", _LIMITS, ("job", "run")),),
    "net.interfaces": (
        Elsewhere("tests/unit/net/test_interfaces.py", "a card with a speed, a job's namespace", ("job", "speed_gbps")),
    ),
    "net.paths": (Elsewhere("tests/unit/net/test_tcp_figures.py", "a second host"),),
    "process.processes": (
        Elsewhere("tests/unit/processes/test_processes_identity.py", "containers", ("container", "pod")),
        Elsewhere(
            "tests/frameworks/test_frameworks.py", "a framework that trains in a thread of its own", ("train_tid",)
        ),
    ),
    "probing.audit": (Elsewhere("tests/integration/inject/test_inject_requests.py", "inject.enabled"),),
    "train.labels": (Elsewhere("tests/unit/labels/test_labels.py", "a job with labels"),),
    "python.trace_event": (Elsewhere("tests/unit/job_rows/test_job_rows_source.py", "a job that imports probing"),),
    "python.training_metrics": (
        Elsewhere("tests/unit/job_rows/test_job_rows_source.py", "a job that imports probing", ("name", "value")),
    ),
    "python.torch_modules": (
        Elsewhere("tests/integration/python_stack/test_torch_modules_rows.py", "sampling.torch_modules"),
    ),
    "python.torch_nccl_flight_record": (
        Elsewhere(
            "tests/unit/nccl_uprobes/test_flight_dump.py",
            "NCCL on GPUs: gloo's operations have no such times",
            ("duration_ns", "time_discovered_completed_ns", "time_discovered_started_ns"),
        ),
    ),
    "python.variables": (
        Elsewhere("tests/unit/python_stack/test_values_fuzz.py", "a value that cannot be read", ("reason",)),
    ),
    "rdma.ports": (Elsewhere("tests/unit/net/test_rdma_ports.py", "InfiniBand or RoCE"),),
    "rdma.qps": (Elsewhere("tests/unit/net/test_nldev.py", "InfiniBand or RoCE"),),
}
METRICS_ELSEWHERE = {
    "probingd_hooks_total": Elsewhere("tests/unit/service/test_metrics_page.py", "a hook"),
}
NEVER: dict[str, tuple[str, ...]] = {
    "comm.ops": ("step",),
    "probing.cost": ("net_bytes",),
    "gpu.devices": ("registry_id",),
    "gpu.utilization": ("renderer_util_pct", "tiler_util_pct", "vector_util_pct"),
    "probing.table_docs": ("synonyms",),
}
"""Columns of Probing or of the format on disk that are NULL by definition; their descriptions begin so, or say so."""
