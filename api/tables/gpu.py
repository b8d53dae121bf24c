"""GPUs of the node: what they do, what they are, who uses them, what happens to them, and how they are linked.

Outside facts: nvml.h of NVIDIA's driver (units and numbers of NVML), and Probing's columns of these tables.
"""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("DEVICES", "EVENTS", "LINKS", "PROCESSES", "UTILIZATION")

_NOT_NVIDIA = "NULL: no GPU of NVIDIA reports it."
_GPM = "NULL before Hopper, on drivers without GPM, and where the driver does not permit it."
_NODE = Column("node", NAME, "Name of the node: configured, else its host name.")
_BACKEND = Column("backend", NAME, "Kind of device, in Probing's words: cuda. Other kinds are not read.")
_DEVICE_ID = Column("device_id", I32, "Number of the GPU as NVML counts, in the order of PCI addresses, from 0.")
_UUID = Column("uuid", NAME, "UUID of the GPU (GPU-...) or of the MIG device (MIG-...).")
_MIG = Column("mig", I32, "Number of the MIG device on its GPU, from 0; NULL for a whole GPU.")

_UTILIZATION_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the values were read, UTC."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    _MIG,
    Column("name", NAME, "Name of the product."),
    Column("memory_model", NAME, "discrete: memory of its own; unified: none (NVML reports no size)."),
    Column("chip", NAME, "Architecture, e.g. hopper; NULL when the driver does not say."),
    Column("free_bytes", I64, "Memory that is free."),
    Column("total_bytes", I64, "Memory of the device."),
    Column("used_bytes", I64, "Memory that processes have; without what the driver reserves, where NVML reports both."),
    Column("reserved_bytes", I64, "Memory that driver and firmware keep; NULL on drivers before 510."),
    Column("mem_used_pct", F64, "used_bytes as per cent of total_bytes."),
    Column(
        "gpu_util_pct",
        F64,
        "Per cent of the time in which any kernel ran; NULL for MIG devices, and for GPUs in"
        " MIG mode: NVML has no such figure there.",
    ),
    Column(
        "mem_controller_util_pct",
        F64,
        "Per cent of the time in which device memory was read or written; NULL as gpu_util_pct.",
    ),
    Column("renderer_util_pct", F64, _NOT_NVIDIA),
    Column("tiler_util_pct", F64, _NOT_NVIDIA),
    Column("driver_mem_bytes", I64, "The same as reserved_bytes."),
    Column("wall_ns", I64, "Time since the row before, ns: that of the rates and of GPM. NULL in the first row."),
    Column("vector_util_pct", F64, _NOT_NVIDIA),
    Column("mem_bandwidth_util_pct", F64, "The same as dram_active_pct."),
    Column("temperature_c", F64, "Temperature of the GPU, degrees Celsius; NULL for MIG devices."),
    Column("power_w", F64, "Power that the whole board takes, W; NULL for MIG devices."),
    Column("mem_temperature_c", F64, "Temperature of the memory, degrees Celsius; NULL where it has no sensor."),
    Column("power_limit_w", F64, "Limit of the power that is enforced now, W."),
    Column("energy_j", F64, "Energy since the driver was loaded, J."),
    Column("sm_clock_mhz", I32, "Clock of the streaming multiprocessors, MHz."),
    Column("mem_clock_mhz", I32, "Clock of the memory, MHz."),
    Column("pstate", I32, "Performance state, 0 the fastest."),
    Column(
        "clock_event_reasons",
        NAME,
        "Why clocks are lower than they could be, comma separated: gpu_idle,"
        " app_clocks, sw_power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, hw_power_brake, display. Empty:"
        " no reason.",
    ),
    Column("power_capped_ns", I64, "Time since the row before in which the power limit held clocks down, ns."),
    Column("sw_thermal_ns", I64, "The same for slowdown by software because of heat."),
    Column("hw_thermal_ns", I64, "The same for slowdown by hardware because of heat; NULL on older drivers."),
    Column("power_brake_ns", I64, "The same for the external power brake; NULL on older drivers."),
    Column(
        "encoder_util_pct",
        F64,
        "Per cent of the time in which the video encoder worked; read every 10 s, as counters of errors are.",
    ),
    Column("decoder_util_pct", F64, "The same for the decoder."),
    Column("pcie_rx_bytes_per_s", F64, "Bytes a second to the GPU over PCIe."),
    Column("pcie_tx_bytes_per_s", F64, "Bytes a second from the GPU over PCIe."),
    Column("nvlink_rx_bytes_per_s", F64, "Data a second to the GPU over all NVLinks; NULL without NVLink."),
    Column("nvlink_tx_bytes_per_s", F64, "Data a second from the GPU over all NVLinks."),
    Column("graphics_active_pct", F64, f"Per cent of the time in which any engine was active (GPM). {_GPM}"),
    Column("sm_active_pct", F64, f"Per cent of the multiprocessors that were busy (GPM). {_GPM}"),
    Column("sm_occupancy_pct", F64, f"Active warps as per cent of the most that there could be (GPM). {_GPM}"),
    Column(
        "tensor_active_pct",
        F64,
        "Per cent of the time in which multiprocessors did tensor operations (GPM): the"
        f" cheapest measure of useful work. {_GPM}",
    ),
    Column("fp64_active_pct", F64, f"Per cent of the time with FP64 outside of tensor cores (GPM). {_GPM}"),
    Column("fp32_active_pct", F64, f"The same for FP32. {_GPM}"),
    Column("fp16_active_pct", F64, f"The same for FP16. {_GPM}"),
    Column("dram_active_pct", F64, f"Bandwidth of device memory as per cent of its most (GPM). {_GPM}"),
    Column("ecc_corrected", I64, "Memory errors that ECC corrected since the driver was loaded; NULL without ECC."),
    Column("ecc_uncorrected", I64, "Memory errors that it could not correct, since the driver was loaded."),
    Column("ecc_corrected_total", I64, "The same over the life of the board."),
    Column("ecc_uncorrected_total", I64, "The same over the life of the board."),
    Column("remapped_corrected", I64, "Rows of memory remapped after corrected errors; NULL before Ampere."),
    Column("remapped_uncorrected", I64, "Rows remapped after uncorrected errors."),
    Column("remap_pending", BOOL, "Whether a row waits for a reset of the GPU to be remapped."),
    Column("remap_failed", BOOL, "Whether a remap has failed: the board must be replaced."),
    Column("retired_pages_sbe", I64, "Pages of memory retired after single-bit errors; NULL where rows are remapped."),
    Column("retired_pages_dbe", I64, "Pages retired after double-bit errors."),
    Column("retirement_pending", BOOL, "Whether a page waits for a reset to be retired."),
    Column("pcie_replays", I64, "PCIe packets sent again since the driver was loaded."),
    Column("pcie_errors", I64, "PCIe errors since then that cannot be corrected, fatal or not; NULL on older drivers."),
    Column(
        "recovery_action",
        NAME,
        "What the driver asks for: none, reset, reboot, drain_p2p, drain_and_reset, ...; NULL on older drivers.",
    ),
    Column("processes", I32, "Processes that have a context on the device; NULL where the driver does not tell."),
)
UTILIZATION = Table(
    "gpu.utilization",
    "What each GPU and MIG device does, a row each gpu.interval_s. What a device or driver does not report is NULL.",
    _UTILIZATION_COLUMNS,
    stored(_UTILIZATION_COLUMNS),
    sort_by=("device_id", "mig", "ts"),
)

DEVICES = Table(
    "gpu.devices",
    "The GPUs and MIG devices of the node (live). A GPU that was lost stays in the list.",
    (
        _NODE,
        Column("ts", TIME, "When the row was made, UTC."),
        _BACKEND,
        _DEVICE_ID,
        _UUID,
        _MIG,
        Column("parent_uuid", NAME, "UUID of the GPU of a MIG device; NULL for a GPU."),
        Column("gpu_instance", I32, "GPU instance of a MIG device."),
        Column("compute_instance", I32, "Compute instance of a MIG device."),
        Column("name", NAME, "Name of the product."),
        Column("memory_model", NAME, "discrete or unified, as in gpu.utilization."),
        Column("chip", NAME, "Architecture, e.g. hopper."),
        Column("compute_capability", NAME, "CUDA compute capability, e.g. 9.0."),
        Column("registry_id", I64, _NOT_NVIDIA),
        Column("total_bytes", I64, "Memory of the device."),
        Column("total_mem_bytes", I64, "The same, by Probing's name."),
        Column("bus_id", NAME, "PCI address, as 0000:17:00.0."),
        Column("minor", I32, "Number of /dev/nvidiaN."),
        Column("serial", TEXT, "Serial number of the board; NULL where it has none."),
        Column("numa_node", I32, "NUMA node of the host that the GPU is attached to; NULL when the host has one node."),
        Column("cpu_list", TEXT, "CPUs near the GPU, as 0-47,96-143."),
        Column("sm_count", I32, "Streaming multiprocessors of a MIG device; NULL for a GPU."),
        Column("mig_mode", BOOL, "Whether the GPU is in MIG mode; NULL where it cannot be."),
        Column("ecc", BOOL, "Whether ECC is on; NULL where the memory has none."),
        Column("max_sm_clock_mhz", I32, "Highest clock of the multiprocessors, MHz."),
        Column("max_mem_clock_mhz", I32, "Highest clock of the memory, MHz."),
        Column("pcie_width", I32, "PCIe lanes as trained."),
        Column("pcie_width_max", I32, "PCIe lanes that GPU and slot could have."),
        Column("pcie_gen", I32, "PCIe generation as trained; an idle GPU lowers it to save power."),
        Column("pcie_gen_max", I32, "PCIe generation that GPU and slot could have."),
        Column("gpm", BOOL, "Whether the GPU has GPM metrics."),
        Column("fabric_cluster", NAME, "UUID of the NVLink fabric that its switches belong to; NULL without one."),
        Column("fabric_clique", I64, "Number of the GPUs in the fabric that can reach each other by NVLink."),
        Column("state", NAME, "ok, lost (fell off the bus, or wants a reset) or gone (no longer listed)."),
        Column("reason", TEXT, "Why it is not ok."),
        Column("driver_version", NAME, "Version of the driver."),
        Column("cuda_version", NAME, "Newest CUDA that the driver runs, e.g. 12.4."),
    ),
)

_PROCESS_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When the values were read, UTC."),
    Column("job", NAME, "Job of the process; NULL for a process that is not watched."),
    Column("run", NAME, "Its incarnation."),
    Column("pid", I32, "Process id as the host sees it."),
    Column("start_ns", I64, "Start of the process since boot, ns; NULL for a process that is not watched."),
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("role", NAME, "trainer, launcher, data_loader or other; NULL for a process that is not watched."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    _MIG,
    Column(
        "source",
        NAME,
        "How the process was joined to the device: driver (NVML lists it), communicator (its NCCL"
        " communicator names the PCI address) or environment (CUDA_VISIBLE_DEVICES and the local rank).",
    ),
    Column("kind", NAME, "compute, graphics or mps; NULL where the driver does not list the process."),
    Column("used_bytes", I64, "Memory of the device that it has; NULL where the driver does not tell."),
    Column(
        "sm_pct",
        F64,
        "Per cent of the multiprocessors' time, in the last sample of the driver; NULL without one,"
        " and on GPUs in MIG mode.",
    ),
    Column("mem_pct", F64, "Per cent of the time in which it used device memory."),
    Column("encoder_pct", F64, "Per cent of the video encoder."),
    Column("decoder_pct", F64, "Per cent of the video decoder."),
)
PROCESSES = Table(
    "gpu.processes",
    "Which process uses which GPU, a row a process and device every gpu.interval_s.",
    _PROCESS_COLUMNS,
    stored(_PROCESS_COLUMNS),
    sort_by=("job", "rank", "device_id", "ts"),
)

_EVENT_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When it was reported, UTC."),
    _BACKEND,
    Column("device_id", I32, "Number of the GPU; NULL where the event is of the driver."),
    Column("uuid", NAME, "UUID of the GPU."),
    Column("gpu_instance", I32, "GPU instance of MIG that it is about, where the driver says."),
    Column("compute_instance", I32, "Compute instance of MIG that it is about, where the driver says."),
    Column(
        "event",
        NAME,
        "From the driver: xid, ecc_single_bit, ecc_double_bit, ecc_storm, pstate, clocks,"
        " power_source, page_retired, page_retirement_failed, poison, fatal_poison, gpu_unavailable,"
        " recovery_action. From what was read: throttled, unthrottled,"
        " row_remapped, remap_failed, nvlink_errors, link_down, link_up,"
        " gpu_lost, gpu_back, driver_lost, driver_back, call_hung, unknown.",
    ),
    Column("xid", I32, "Number of an Xid: docs.nvidia.com/deploy/xid-errors has the list; NULL for other events."),
    Column("value", I64, "What changed, where a number says it: errors since the last look, a new state."),
    Column("detail", TEXT, "The event in words."),
    Column("suppressed", I64, "Events of this kind and device that were left out before it, being too many."),
)
EVENTS = Table(
    "gpu.events",
    "What happens to GPUs and their driver: Xids, memory errors, throttling, GPUs that are lost, calls that hang.",
    _EVENT_COLUMNS,
    stored(_EVENT_COLUMNS),
)

_LINK_COLUMNS = (
    _NODE,
    Column("ts", TIME, "When it was read, UTC."),
    _BACKEND,
    _DEVICE_ID,
    _UUID,
    Column("kind", NAME, "gpu (to another GPU), nic (to a network device), nvlink (one link) or pcie (to the host)."),
    Column("link", I32, "Number of the NVLink, from 0; NULL for other kinds."),
    Column(
        "peer",
        NAME,
        "The other end: UUID of a GPU, name of a NIC or HCA; for an nvlink its PCI address; for pcie the slot above.",
    ),
    Column("peer_kind", NAME, "gpu, switch, nic, hca, host or unknown."),
    Column("peer_id", I32, "device_id of the other GPU."),
    Column(
        "path",
        NAME,
        "Way between the two, as nvidia-smi topo writes it: NV18 (so many NVLinks), PIX (one PCIe"
        " switch), PXB (several), PHB (a host bridge), NODE (one NUMA node), SYS (across); one link: NV or PCIE.",
    ),
    Column("p2p", NAME, "Whether the GPUs can read each other's memory: ok, or why not; NULL for other kinds."),
    Column("numa_node", I32, "NUMA node of the near end (pcie) or of the peer (nic)."),
    Column(
        "state",
        NAME,
        "up or down (nvlink), full or degraded (pcie: fewer lanes than there could be, or slower while busy).",
    ),
    Column("width", I32, "Lanes (pcie) or links (gpu) that are in use."),
    Column("width_max", I32, "Lanes or links that there could be."),
    Column("generation", I32, "PCIe generation or version of NVLink, as trained."),
    Column("generation_max", I32, "PCIe generation that both ends could have."),
    Column("speed_bytes_per_s", F64, "Data in one direction that the link can carry as trained (pcie, nvlink)."),
    Column("speed_max_bytes_per_s", F64, "The same at its best."),
    Column("rx_bytes_per_s", F64, "Data a second to the GPU since the last row of this link; NULL where not counted."),
    Column("tx_bytes_per_s", F64, "Data a second from the GPU."),
    Column("replays", I64, "Packets sent again, since the driver was loaded."),
    Column("recoveries", I64, "Times that the link recovered from errors (nvlink)."),
    Column("crc_errors", I64, "Packets with a wrong checksum (nvlink), bad TLPs and DLLPs (pcie)."),
    Column("fatal_errors", I64, "Errors that could not be corrected (pcie)."),
)
LINKS = Table(
    "gpu.links",
    "How GPUs are linked to each other, to NICs and to the host: all links once a minute and when one changes, NVLink"
    " and PCIe with their counters every gpu.links_interval_s.",
    _LINK_COLUMNS,
    stored(_LINK_COLUMNS),
    sort_by=("kind", "device_id", "link", "ts"),
)
