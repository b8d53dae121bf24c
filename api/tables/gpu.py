"""Tables of the GPUs of the node: their use, their properties, the processes that use them, their events, and their
links.

Sources: nvml.h of NVIDIA's driver (units and numbers of NVML), and the columns that Probing has in these tables.
"""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("DEVICES", "EVENTS", "LINKS", "PROCESSES", "UTILIZATION")

_NOT_NVIDIA = "Always NULL: NVIDIA GPUs do not report this value."
_GPM = "NULL on GPUs before Hopper, on drivers without GPM, and if the driver does not permit GPM."
_NODE = Column("node", NAME, "Name of the node: configured, else its host name.")
_BACKEND = Column("backend", NAME, "Kind of device, in Probing's words: always cuda, because other kinds are not read.")
_DEVICE_ID = Column("device_id", I32, "Number of the GPU in NVML's order, the order of PCI addresses, from 0.")
_UUID = Column("uuid", NAME, "UUID of the GPU (GPU-...) or of the MIG device (MIG-...).")
_MIG = Column("mig", I32, "Number of the MIG device within its GPU, from 0; NULL for a whole GPU.")

_UTILIZATION_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the values were read, UTC."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    _MIG,
    Column("name", NAME, "Name of the product."),
    Column(
        "memory_model", NAME, "discrete: the device has its own memory; unified: it has none (NVML reports no size)."
    ),
    Column("chip", NAME, "Architecture, e.g. hopper; NULL if the driver does not report it."),
    Column("free_bytes", I64, "Free memory of the device, bytes."),
    Column("total_bytes", I64, "Total memory of the device, bytes."),
    Column(
        "used_bytes",
        I64,
        "Memory that processes use, bytes. Memory that the driver reserves is not included if NVML reports it"
        " separately.",
    ),
    Column("reserved_bytes", I64, "Memory that driver and firmware reserve, bytes; NULL on drivers before 510."),
    Column("mem_used_pct", F64, "used_bytes as per cent of total_bytes."),
    Column(
        "gpu_util_pct",
        F64,
        "Per cent of the time in which any kernel ran; NULL for MIG devices and GPUs in MIG mode, for which"
        " NVML does not report it.",
    ),
    Column(
        "mem_controller_util_pct",
        F64,
        "Per cent of the time in which device memory was read or written; NULL for MIG devices and GPUs in MIG mode.",
    ),
    Column("renderer_util_pct", F64, _NOT_NVIDIA),
    Column("tiler_util_pct", F64, _NOT_NVIDIA),
    Column("driver_mem_bytes", I64, "Memory that driver and firmware reserve, the same as reserved_bytes."),
    Column(
        "wall_ns",
        I64,
        "Time since the previous row, ns, over which rates and GPM metrics are computed; NULL in the first row.",
    ),
    Column("vector_util_pct", F64, _NOT_NVIDIA),
    Column("mem_bandwidth_util_pct", F64, "Used part of the memory bandwidth, the same as dram_active_pct."),
    Column("temperature_c", F64, "Temperature of the GPU, degrees Celsius; NULL for MIG devices."),
    Column("power_w", F64, "Power that the whole board uses, W; NULL for MIG devices."),
    Column("mem_temperature_c", F64, "Temperature of the memory, degrees Celsius; NULL if the memory has no sensor."),
    Column("power_limit_w", F64, "Power limit that is enforced now, W."),
    Column("energy_j", F64, "Energy used since the driver was loaded, J."),
    Column("sm_clock_mhz", I32, "Clock of the streaming multiprocessors, MHz."),
    Column("mem_clock_mhz", I32, "Clock of the memory, MHz."),
    Column("pstate", I32, "Performance state; 0 is the fastest."),
    Column(
        "clock_event_reasons",
        NAME,
        "Throttle reasons: why the clocks are lower than they could be, comma separated: gpu_idle, app_clocks,"
        " sw_power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, hw_power_brake, display. Empty if the clocks"
        " are not lowered.",
    ),
    Column("power_capped_ns", I64, "Time in which the power limit lowered the clocks, since the previous row, ns."),
    Column(
        "sw_thermal_ns", I64, "Time in which software lowered the clocks because of heat, since the previous row, ns."
    ),
    Column(
        "hw_thermal_ns",
        I64,
        "Time in which hardware lowered the clocks because of heat, since the previous row, ns; NULL on older drivers.",
    ),
    Column(
        "power_brake_ns",
        I64,
        "Time in which the external power brake lowered the clocks, since the previous row, ns; NULL on older drivers.",
    ),
    Column(
        "encoder_util_pct",
        F64,
        "Per cent of the time in which the video encoder worked; read only every 10 s.",
    ),
    Column("decoder_util_pct", F64, "Per cent of the time in which the video decoder worked; read only every 10 s."),
    Column("pcie_rx_bytes_per_s", F64, "Bytes a second that the GPU receives over PCIe."),
    Column("pcie_tx_bytes_per_s", F64, "Bytes a second that the GPU sends over PCIe."),
    Column("nvlink_rx_bytes_per_s", F64, "Bytes a second that the GPU receives over all NVLinks; NULL without NVLink."),
    Column("nvlink_tx_bytes_per_s", F64, "Bytes a second that the GPU sends over all NVLinks; NULL without NVLink."),
    Column("graphics_active_pct", F64, f"Per cent of the time in which any engine was active (GPM). {_GPM}"),
    Column("sm_active_pct", F64, f"Per cent of the multiprocessors that were busy (GPM). {_GPM}"),
    Column("sm_occupancy_pct", F64, f"Active warps as per cent of the possible maximum (GPM). {_GPM}"),
    Column(
        "tensor_active_pct",
        F64,
        "Per cent of the time in which multiprocessors did tensor operations (GPM): the"
        f" cheapest measure of useful work. {_GPM}",
    ),
    Column("fp64_active_pct", F64, f"Per cent of the time in which FP64 ran outside of tensor cores (GPM). {_GPM}"),
    Column("fp32_active_pct", F64, f"Per cent of the time in which FP32 ran outside of tensor cores (GPM). {_GPM}"),
    Column("fp16_active_pct", F64, f"Per cent of the time in which FP16 ran outside of tensor cores (GPM). {_GPM}"),
    Column("dram_active_pct", F64, f"Bandwidth of device memory as per cent of its maximum (GPM). {_GPM}"),
    Column(
        "ecc_corrected",
        I64,
        "Number of memory errors that ECC corrected since the driver was loaded; NULL without ECC.",
    ),
    Column("ecc_uncorrected", I64, "Number of memory errors that ECC could not correct since the driver was loaded."),
    Column("ecc_corrected_total", I64, "Number of memory errors that ECC corrected over the life of the board."),
    Column(
        "ecc_uncorrected_total", I64, "Number of memory errors that ECC could not correct over the life of the board."
    ),
    Column("remapped_corrected", I64, "Number of memory rows remapped after corrected errors; NULL before Ampere."),
    Column("remapped_uncorrected", I64, "Number of memory rows remapped after uncorrected errors."),
    Column("remap_pending", BOOL, "Whether a memory row will be remapped at the next reset of the GPU."),
    Column("remap_failed", BOOL, "Whether a remap has failed: the board must be replaced."),
    Column(
        "retired_pages_sbe",
        I64,
        "Number of memory pages retired after single-bit errors; NULL on GPUs that remap rows.",
    ),
    Column("retired_pages_dbe", I64, "Number of memory pages retired after double-bit errors."),
    Column("retirement_pending", BOOL, "Whether a memory page will be retired at the next reset of the GPU."),
    Column("pcie_replays", I64, "Number of PCIe packets that were retransmitted since the driver was loaded."),
    Column(
        "pcie_errors",
        I64,
        "Number of PCIe errors since the driver was loaded that could not be corrected; NULL on older drivers.",
    ),
    Column(
        "recovery_action",
        NAME,
        "Action that the driver asks for: none, reset, reboot, drain_p2p, drain_and_reset, ...; NULL on older drivers.",
    ),
    Column(
        "processes",
        I32,
        "Number of processes that have a context on the device; NULL if the driver does not report it.",
    ),
)
UTILIZATION = Table(
    "gpu.utilization",
    "Load and state of each GPU and MIG device, one row every gpu.interval_s. Values that a device or driver"
    " does not report are NULL.",
    _UTILIZATION_COLUMNS,
    stored(_UTILIZATION_COLUMNS),
    sort_by=("device_id", "mig", "ts"),
)

DEVICES = Table(
    "gpu.devices",
    "The GPUs and MIG devices of the node (live). A GPU that is lost stays in the list.",
    (
        _NODE,
        Column("ts", TIME, "When the row was made, UTC."),
        _BACKEND,
        _DEVICE_ID,
        _UUID,
        _MIG,
        Column("parent_uuid", NAME, "UUID of the GPU that the MIG device is on; NULL for a whole GPU."),
        Column("gpu_instance", I32, "Number of the GPU instance; NULL for a whole GPU."),
        Column("compute_instance", I32, "Number of the compute instance; NULL for a whole GPU."),
        Column("name", NAME, "Name of the product."),
        Column("memory_model", NAME, "discrete or unified; see gpu.utilization."),
        Column("chip", NAME, "Architecture, e.g. hopper."),
        Column("compute_capability", NAME, "CUDA compute capability, e.g. 9.0."),
        Column("registry_id", I64, _NOT_NVIDIA),
        Column("total_bytes", I64, "Total memory of the device, bytes."),
        Column("total_mem_bytes", I64, "The same as total_bytes, under Probing's name."),
        Column("bus_id", NAME, "PCI address, e.g. 0000:17:00.0."),
        Column("minor", I32, "Number N of the file /dev/nvidiaN."),
        Column("serial", TEXT, "Serial number of the board; NULL if it has none."),
        Column(
            "numa_node", I32, "NUMA node of the host to which the GPU is attached; NULL if the host has one NUMA node."
        ),
        Column("cpu_list", TEXT, "CPUs near the GPU, e.g. 0-47,96-143."),
        Column("sm_count", I32, "Number of streaming multiprocessors of a MIG device; NULL for a whole GPU."),
        Column("mig_mode", BOOL, "Whether the GPU is in MIG mode; NULL if it does not support MIG."),
        Column("ecc", BOOL, "Whether ECC is on; NULL if the memory has no ECC."),
        Column("max_sm_clock_mhz", I32, "Highest clock of the multiprocessors, MHz."),
        Column("max_mem_clock_mhz", I32, "Highest clock of the memory, MHz."),
        Column("pcie_width", I32, "PCIe lanes in use."),
        Column("pcie_width_max", I32, "PCIe lanes that GPU and slot support."),
        Column("pcie_gen", I32, "PCIe generation in use; an idle GPU lowers it to save power."),
        Column("pcie_gen_max", I32, "PCIe generation that GPU and slot support."),
        Column("gpm", BOOL, "Whether the GPU has GPM metrics."),
        Column("fabric_cluster", NAME, "UUID of the NVLink fabric to which the GPU belongs; NULL if there is none."),
        Column(
            "fabric_clique",
            I64,
            "Number of the clique: the same for all GPUs of the fabric that can reach each other by NVLink.",
        ),
        Column("state", NAME, "ok, lost (it fell off the bus or needs a reset) or gone (it is no longer listed)."),
        Column("reason", TEXT, "Why the state is not `ok`."),
        Column("driver_version", NAME, "Version of the driver."),
        Column("cuda_version", NAME, "Newest version of CUDA that the driver supports, e.g. 12.4."),
    ),
)

_PROCESS_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the values were read, UTC."),
    Column("job", NAME, "Job of the process; NULL if the process is not watched."),
    Column("run", NAME, "The run of the job."),
    Column("pid", I32, "Process id as the host sees it."),
    Column("start_ns", I64, "Start of the process since boot, ns; NULL if the process is not watched."),
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("role", NAME, "trainer, launcher, data_loader or other; NULL if the process is not watched."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    _MIG,
    Column(
        "source",
        NAME,
        "How the device of the process was found: driver (NVML lists the process), communicator (the"
        " process's NCCL communicator names the PCI address) or environment (CUDA_VISIBLE_DEVICES and the"
        " local rank).",
    ),
    Column("kind", NAME, "compute, graphics or mps; NULL if the driver does not list the process."),
    Column("used_bytes", I64, "Device memory that the process uses, bytes; NULL if the driver does not report it."),
    Column(
        "sm_pct",
        F64,
        "Per cent of the multiprocessors' time that the process used in the driver's last sample; NULL"
        " without a sample, and on GPUs in MIG mode.",
    ),
    Column("mem_pct", F64, "Per cent of the time in which the process used device memory."),
    Column("encoder_pct", F64, "Per cent of the time in which the process used the video encoder."),
    Column("decoder_pct", F64, "Per cent of the time in which the process used the video decoder."),
)
PROCESSES = Table(
    "gpu.processes",
    "Which processes use which GPUs: one row for each process and device every gpu.interval_s.",
    _PROCESS_COLUMNS,
    stored(_PROCESS_COLUMNS),
    sort_by=("job", "rank", "device_id", "ts"),
)

_EVENT_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the event was reported, UTC."),
    _BACKEND,
    Column("device_id", I32, "Number of the GPU; NULL if the event is about the driver."),
    Column("uuid", NAME, "UUID of the GPU."),
    Column("gpu_instance", I32, "GPU instance of MIG that the event is about, if the driver says so."),
    Column("compute_instance", I32, "Compute instance of MIG that the event is about, if the driver says so."),
    Column(
        "event",
        NAME,
        "Kind of the event. Reported by the driver: xid, ecc_single_bit, ecc_double_bit, ecc_storm, pstate,"
        " clocks, power_source, page_retired, page_retirement_failed, poison, fatal_poison, gpu_unavailable,"
        " recovery_action. Found by comparing readings: throttled, unthrottled, row_remapped, remap_failed,"
        " nvlink_errors, link_down, link_up, gpu_lost, gpu_back, driver_lost, driver_back, call_hung, unknown.",
    ),
    Column("xid", I32, "Number of the Xid, listed at docs.nvidia.com/deploy/xid-errors; NULL for other events."),
    Column("value", I64, "Number that belongs to the event: errors since the last reading, or the new state."),
    Column("detail", TEXT, "The event as text."),
    Column(
        "suppressed",
        I64,
        "Number of earlier events of this kind and device that were left out because there were too many.",
    ),
)
EVENTS = Table(
    "gpu.events",
    "Events of GPUs and their driver: Xids, memory errors, throttling, lost GPUs, calls that hang.",
    _EVENT_COLUMNS,
    stored(_EVENT_COLUMNS),
)

_LINK_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the link was read, UTC."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    Column("kind", NAME, "gpu (to another GPU), nic (to a network device), nvlink (one link) or pcie (to the host)."),
    Column("link", I32, "Number of the NVLink, from 0; NULL for other kinds."),
    Column(
        "peer",
        NAME,
        "Other end of the link. Kind gpu: UUID of the GPU; nic: name of the NIC or HCA; nvlink: PCI address of the"
        " other end; pcie: the upper port.",
    ),
    Column("peer_kind", NAME, "Kind of the other end: gpu, switch, nic, hca, host or unknown."),
    Column("peer_id", I32, "device_id of the GPU at the other end."),
    Column(
        "path",
        NAME,
        "Connection between the two ends, in the terms of `nvidia-smi topo`: NV18 (18 NVLinks), PIX (one PCIe"
        " switch), PXB (several), PHB (a host bridge), NODE (one NUMA node), SYS (across NUMA nodes); for a"
        " single link NV or PCIE.",
    ),
    Column("p2p", NAME, "Whether the two GPUs can read each other's memory: ok, or why not; NULL for other kinds."),
    Column("numa_node", I32, "NUMA node of the GPU (pcie) or of the network device (nic)."),
    Column(
        "state",
        NAME,
        "up or down (nvlink); full or degraded (pcie: fewer lanes than possible, or slower while busy); NULL if the"
        " driver does not say.",
    ),
    Column("width", I32, "Number of lanes (pcie) or links (gpu) in use."),
    Column("width_max", I32, "Number of lanes or links that are possible."),
    Column("generation", I32, "PCIe generation or version of NVLink in use."),
    Column("generation_max", I32, "PCIe generation that both ends support."),
    Column("speed_bytes_per_s", F64, "Bytes a second that the link can carry in one direction now (pcie, nvlink)."),
    Column("speed_max_bytes_per_s", F64, "Bytes a second that the link could carry in one direction at best."),
    Column(
        "rx_bytes_per_s",
        F64,
        "Bytes a second that the GPU received since the previous row of this link; NULL if not counted.",
    ),
    Column(
        "tx_bytes_per_s",
        F64,
        "Bytes a second that the GPU sent since the previous row of this link; NULL if not counted.",
    ),
    Column("replays", I64, "Number of packets retransmitted since the driver was loaded."),
    Column("recoveries", I64, "Number of times that the link recovered from errors (nvlink)."),
    Column(
        "crc_errors", I64, "Number of packets with a wrong checksum (nvlink), or number of bad TLPs and DLLPs (pcie)."
    ),
    Column("fatal_errors", I64, "Number of errors that could not be corrected (pcie)."),
)
LINKS = Table(
    "gpu.links",
    "How GPUs are linked to each other, to NICs and to the host. All links have a row once a minute, and when one of"
    " them changes. NVLink and PCIe links, with their counters, have a row every gpu.links_interval_s.",
    _LINK_COLUMNS,
    stored(_LINK_COLUMNS),
    sort_by=("kind", "device_id", "link", "ts"),
)
