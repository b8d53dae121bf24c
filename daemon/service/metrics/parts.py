"""The parts of the page that come from rows: each has an SQL statement, and a metric for each of its columns.

Each part is limited: a page shows at most MOST_SERIES rows of a statement, whatever the jobs do. Communicators,
sequence numbers and pids are not used as labels, because a job has many of them. Names and units follow the rules that
``promtool check metrics`` tests. The label of the job is ``training_job``, since Prometheus itself uses ``job`` for its
targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ("MOST_SERIES", "PARTS", "Metric", "Part")

# The maximum number of rows of one part. A node with more ranks shows only some of them, and sets
# probingd_scrape_truncated.
MOST_SERIES = 1024
_S = 1e-9
_MHZ = 1e6
_PCT = 0.01


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. Its value is ``column`` of the statement times ``scale``."""

    name: str
    doc: str
    column: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page. ``labels``: the column of each label. ``sql`` has no ORDER BY and no LIMIT at its end."""

    name: str
    sql: str
    labels: Mapping[str, str]
    metrics: tuple[Metric, ...]
    order: str

    @property
    def statement(self) -> str:
        """The SQL with a LIMIT of one row more than is shown, so that a truncated part is noticed."""
        return f"{self.sql} ORDER BY {self.order} LIMIT {MOST_SERIES + 1}"


_RANK = {"training_job": "job", "rank": "rank"}
_GPU = {"gpu": "device_id", "mig": "mig", "uuid": "uuid"}

PARTS = (
    Part(
        "processes",
        """
SELECT job, count(*) AS trainers, count(*) FILTER (WHERE state IN ('stopped', 'blocked')) AS halted,
  max(world_size) AS world_size
FROM process.processes WHERE role = 'trainer' AND state <> 'exited' GROUP BY job
""",
        {"training_job": "job"},
        (
            Metric("probingd_job_ranks", "Ranks of the job that run on this node.", "trainers"),
            Metric(
                "probingd_job_halted_ranks",
                "Ranks on this node that are stopped or in uninterruptible sleep.",
                "halted",
            ),
            Metric("probingd_job_world_size", "Ranks of the job on all nodes.", "world_size"),
        ),
        "job",
    ),
    Part(
        "progress",
        """
SELECT job, rank, (epoch_ns(max(ts)) - epoch_ns(max(last_call))) AS since_ns, count(comm) AS communicators
FROM comm.progress WHERE ended IS NULL AND last_call IS NOT NULL GROUP BY job, rank
""",
        _RANK,
        (
            Metric(
                "probingd_rank_since_last_collective_seconds",
                "Time since the rank last called a collective, on any communicator.",
                "since_ns",
                _S,
            ),
            Metric(
                "probingd_rank_communicators",
                "Communicators on which the rank has called a collective.",
                "communicators",
            ),
        ),
        "job, rank",
    ),
    Part(
        "inflight",
        "SELECT job, rank, count(*) AS operations, max(age_ns) AS age_ns FROM comm.inflight GROUP BY job, rank",
        _RANK,
        (
            Metric(
                "probingd_rank_collectives_in_flight",
                "Collectives that the rank has called and not finished.",
                "operations",
            ),
            Metric(
                "probingd_rank_collective_in_flight_seconds",
                "Time since the oldest collective in flight was called.",
                "age_ns",
                _S,
            ),
        ),
        "age_ns DESC, job, rank",
    ),
    Part(
        "steps",
        """
SELECT job, rank, 1e9 * count(*) / greatest(epoch_ns(now()) - epoch_ns(min(t_start)), 1) AS rate,
  avg(duration_ns) AS duration_ns, avg(comm_ns) AS comm_ns, avg(wait_ns) AS wait_ns,
  max(avg(wait_ns)) OVER (PARTITION BY job) - avg(wait_ns) AS lag_ns
FROM train.steps WHERE ts > now() - INTERVAL 2 MINUTE GROUP BY job, rank
""",
        _RANK,
        (
            Metric(
                "probingd_rank_steps_per_second",
                "Training steps a second over the last two minutes; it sinks while no step ends.",
                "rate",
            ),
            Metric(
                "probingd_rank_step_seconds", "Average length of the steps of the last two minutes.", "duration_ns", _S
            ),
            Metric(
                "probingd_rank_step_communication_seconds",
                "Average time of a step in which a collective ran.",
                "comm_ns",
                _S,
            ),
            Metric(
                "probingd_rank_step_wait_seconds",
                "Average time of a step in which the rank waited for another rank of this node.",
                "wait_ns",
                _S,
            ),
            Metric(
                "probingd_rank_lag_seconds",
                "How late the rank is in each step: the wait of the job's longest waiting rank on this node, minus the"
                " wait of this rank.",
                "lag_ns",
                _S,
            ),
        ),
        "job, rank",
    ),
    Part(
        "collectives",
        """
SELECT job, backend, op, count(*) / 10.0 AS rate, avg(duration_ns) AS duration_ns, avg(busbw_gbps) AS busbw_gbps
FROM comm.ops WHERE ts > now() - INTERVAL 10 SECOND GROUP BY job, backend, op
""",
        {"training_job": "job", "backend": "backend", "op": "op"},
        (
            Metric(
                "probingd_collectives_per_second",
                "Collectives a second of all ranks on this node that ended in the last 10 s.",
                "rate",
            ),
            Metric(
                "probingd_collective_seconds",
                "Average length of the collectives that ended in the last 10 s.",
                "duration_ns",
                _S,
            ),
            Metric(
                "probingd_collective_bus_bytes_per_second",
                "Average bus bandwidth of the collectives that ended in the last 10 s.",
                "busbw_gbps",
                1e9,
            ),
        ),
        "job, backend, op",
    ),
    Part(
        "findings",
        """
SELECT job, verdict, severity, count(*) AS findings FROM (
  SELECT job, verdict, severity, state FROM diagnosis.findings WHERE ts > now() - INTERVAL 7 DAY
  QUALIFY row_number() OVER (PARTITION BY job, run, finding_id ORDER BY ts DESC) = 1
) AS newest WHERE state = 'open' GROUP BY job, verdict, severity
""",
        {"training_job": "job", "verdict": "verdict", "severity": "severity"},
        (Metric("probingd_findings_open", "Findings of diagnosis that are open.", "findings"),),
        "severity, job, verdict",
    ),
    Part(
        "memory",
        """
SELECT job, rank, sum(rss_bytes) AS rss_bytes FROM (
  SELECT job, rank, rss_bytes FROM process.memory WHERE ts > now() - INTERVAL 1 MINUTE AND role = 'trainer'
  QUALIFY row_number() OVER (PARTITION BY pid, start_ns ORDER BY ts DESC) = 1
) AS newest GROUP BY job, rank
""",
        _RANK,
        (Metric("probingd_rank_resident_memory_bytes", "Resident memory of the rank's process.", "rss_bytes"),),
        "job, rank",
    ),
    Part(
        "gpus",
        """
SELECT device_id, mig, uuid, gpu_util_pct, sm_active_pct, tensor_active_pct, used_bytes, total_bytes, temperature_c,
  power_w, power_limit_w, sm_clock_mhz, pcie_rx_bytes_per_s, pcie_tx_bytes_per_s, nvlink_rx_bytes_per_s,
  nvlink_tx_bytes_per_s, ecc_uncorrected,
  (clock_event_reasons LIKE '%thermal%' OR clock_event_reasons LIKE '%hw_%')::INT AS throttled
FROM gpu.utilization WHERE ts > now() - INTERVAL 30 SECOND
QUALIFY row_number() OVER (PARTITION BY device_id, mig, uuid ORDER BY ts DESC) = 1
""",
        _GPU,
        (
            Metric(
                "probingd_gpu_utilization_ratio", "Share of the time in which any kernel ran.", "gpu_util_pct", _PCT
            ),
            Metric(
                "probingd_gpu_sm_active_ratio", "Share of the multiprocessors that were busy.", "sm_active_pct", _PCT
            ),
            Metric(
                "probingd_gpu_tensor_active_ratio", "Share of the time in tensor operations.", "tensor_active_pct", _PCT
            ),
            Metric("probingd_gpu_memory_used_bytes", "Memory in use.", "used_bytes"),
            Metric("probingd_gpu_memory_size_bytes", "Memory of the GPU.", "total_bytes"),
            Metric("probingd_gpu_temperature_celsius", "Temperature.", "temperature_c"),
            Metric("probingd_gpu_power_watts", "Power that the board takes.", "power_w"),
            Metric("probingd_gpu_power_limit_watts", "Limit of the power.", "power_limit_w"),
            Metric("probingd_gpu_sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_mhz", _MHZ),
            Metric(
                "probingd_gpu_pcie_receive_bytes_per_second", "Traffic to the GPU over PCIe.", "pcie_rx_bytes_per_s"
            ),
            Metric(
                "probingd_gpu_pcie_transmit_bytes_per_second", "Traffic from the GPU over PCIe.", "pcie_tx_bytes_per_s"
            ),
            Metric(
                "probingd_gpu_nvlink_receive_bytes_per_second",
                "Traffic to the GPU over NVLink.",
                "nvlink_rx_bytes_per_s",
            ),
            Metric(
                "probingd_gpu_nvlink_transmit_bytes_per_second",
                "Traffic from the GPU over NVLink.",
                "nvlink_tx_bytes_per_s",
            ),
            Metric(
                "probingd_gpu_uncorrected_ecc_errors",
                "Memory errors that could not be corrected since the driver was loaded.",
                "ecc_uncorrected",
            ),
            Metric(
                "probingd_gpu_throttled",
                "1 while heat, hardware or the power brake holds the clocks down.",
                "throttled",
            ),
        ),
        "device_id, mig, uuid",
    ),
    Part(
        "cost",
        """
SELECT process, sum(cpu_pct) AS cpu_pct, sum(rss_bytes) AS rss_bytes FROM (
  SELECT process, cpu_pct, rss_bytes FROM probing.cost WHERE ts > now() - INTERVAL 30 SECOND
  QUALIFY row_number() OVER (PARTITION BY process, pid ORDER BY ts DESC) = 1
) AS newest GROUP BY process
""",
        {"process": "process"},
        (
            Metric(
                "probingd_process_cpu_ratio",
                "CPU time of the daemon's processes as a share of one core; for"
                " the probes, the CPU time that they cost the jobs.",
                "cpu_pct",
                _PCT,
            ),
            Metric("probingd_process_memory_bytes", "Resident memory of the daemon's processes.", "rss_bytes"),
        ),
        "process",
    ),
    Part(
        "segments",
        """
SELECT table_name, files, bytes, epoch_ns(ts) - epoch_ns(oldest) AS age_ns FROM probing.store WHERE kind = 'segments'
""",
        {"table": "table_name"},
        (
            Metric("probingd_table_segments", "Segments of the table.", "files"),
            Metric("probingd_table_bytes", "Bytes of the table's segments.", "bytes"),
            Metric(
                "probingd_table_oldest_row_age_seconds", "Age of the oldest row in the table's segments.", "age_ns", _S
            ),
        ),
        "bytes DESC, table_name",
    ),
    Part(
        "log",
        "SELECT files, bytes FROM probing.store WHERE kind = 'log'",
        {},
        (
            Metric("probingd_log_bytes", "Bytes of the log: rows that are not sealed into segments yet.", "bytes"),
            Metric("probingd_log_parts", "Parts of the log.", "files"),
        ),
        "files",
    ),
)
