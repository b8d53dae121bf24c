"""The configuration: /etc/probingd/probingd.toml, overridden by the command line, the same in every process.

Each option is a field of the classes here, with its text and bounds in the annotation. The keys of the file, the
command line (``--store.max_bytes=N``), the help and the check of docs/config.md are derived from these fields.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket as _socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from probing.api.errors import ConfigError
from probing.daemon import toml

__all__ = (
    "CONTROL",
    "DEFAULT_FILE",
    "LEAST_DAYS",
    "LEAST_TABLE_BYTES",
    "PUBLIC",
    "ClusterConfig",
    "Config",
    "CudaConfig",
    "DiagnoseConfig",
    "GpuConfig",
    "GroupsConfig",
    "HostConfig",
    "InjectConfig",
    "JobRowsConfig",
    "LabelsConfig",
    "LogsConfig",
    "NcclConfig",
    "NetConfig",
    "Option",
    "ProbesConfig",
    "QueryConfig",
    "SamplingConfig",
    "StoreConfig",
    "TlsConfig",
    "UsersConfig",
    "VariablesConfig",
    "checked_text",
    "is_collected",
    "options",
    "shown",
    "text_of",
)

DEFAULT_FILE = Path("/etc/probingd/probingd.toml")
# Path of the service's socket within the runtime directory.
PUBLIC = "public/probingd.sock"
# Directory of the collector's socket within the runtime directory; the service may enter it.
CONTROL = "control"
# The maximum length of the socket's path PATH, in bytes. sun_path holds 108 bytes including the final NUL, and the
# longest path that is made from PATH is PATH.d/public/probingd.sock.
MAX_SOCKET_PATH = 107 - len(f".d/{PUBLIC}")
MAX_FILE_BYTES = 1 << 20
MAX_LABELS = 16
# The smallest limits of stored rows, in days and bytes: a lower limit would delete rows at once.
LEAST_DAYS, LEAST_TABLE_BYTES = 0.05, 1 << 20
# The sections that a caller with the scope probe may change: they say what is collected. All others need the scope
# admin.
_COLLECTED = frozenset(("cuda", "gpu", "host", "job_rows", "labels", "logs", "nccl", "net", "sampling", "variables"))
# The maximum number of entries of a list that has no bound of its own.
MAX_ENTRIES = 1 << 16
# The maximum number of variables that are read from a process at once (values.names.MAX_NAMES).
MAX_WATCHED = 64


class Option(NamedTuple):
    """An option of the configuration: the annotation of its field, with the default.

    ``least`` and ``most``: the bounds of its value; for a list, ``most`` is the maximum length. ``hidden``: the value
    may contain a secret, and is not shown to clients with the scope read.
    """

    doc: str
    least: float | None = None
    most: float = 2.0**62
    hidden: bool = False
    default: Any = None


class UsersConfig(NamedTuple):
    """The users of the daemon's processes. Each is a name or a number; a number needs no account."""

    collector: Annotated[str, Option("user of the collector and the readers")] = "probing"
    service: Annotated[str, Option("user of the gRPC service")] = "probing-service"
    worker: Annotated[str, Option("user of SQL workers, parsers and the store's maintenance")] = "probing-worker"
    group: Annotated[str, Option("group that may talk to the socket and read the segments")] = "probing"


class TlsConfig(NamedTuple):
    cert: Annotated[str, Option("file with the certificate chain of listen and http, as PEM; empty: no TLS")] = ""
    key: Annotated[
        str, Option("file with the private key of cert; the service's user, and nobody else, must be able to read it")
    ] = ""
    client_ca: Annotated[
        str, Option("file with the authorities (CAs) of clients; if set, each connection needs a client certificate")
    ] = ""
    peer_ca: Annotated[
        str, Option("file with the authorities (CAs) of other nodes; a certificate signed by one gives the scope peer")
    ] = ""


class StoreConfig(NamedTuple):
    max_bytes: Annotated[int, Option("bytes that the state directory may take", 16 << 20)] = 10 << 30
    keep_free_bytes: Annotated[
        int, Option("bytes to leave free on the state directory's file system; -1: 1 GiB, at most a tenth of it", -1)
    ] = -1
    max_age_days: Annotated[float, Option("days to keep rows", LEAST_DAYS)] = 7.0
    grace_s: Annotated[
        float,
        Option("seconds after which a new, stricter limit deletes rows; until then it can be undone", 0, 86400),
    ] = 600.0
    sync_interval_s: Annotated[float, Option("seconds of rows that may be lost in a power cut", 0.01)] = 1.0
    part_bytes: Annotated[int, Option("size at which a part of the log is sealed into segments", 1 << 16)] = 8 << 20
    segment_bytes: Annotated[int, Option("size up to which segments of a table and day are merged", 1 << 16)] = 64 << 20
    table_max_bytes: Annotated[
        tuple[str, ...], Option("most bytes of single tables, e.g. python.samples=2000000000")
    ] = ()
    table_max_age_days: Annotated[
        tuple[str, ...], Option("days to keep rows of single tables, e.g. python.samples=1.5")
    ] = ()


class QueryConfig(NamedTuple):
    timeout_s: Annotated[
        float,
        Option("timeout of a query, in seconds, if the caller sets no deadline or the rows are not streamed", 0.1),
    ] = 30.0
    unread_s: Annotated[float, Option("seconds after which an answer ends if its client reads no rows", 0.1)] = 300.0
    memory_bytes: Annotated[int, Option("memory of one SQL worker", 64 << 20)] = 1 << 30
    workers: Annotated[int, Option("SQL workers kept warm; more start when queries overlap", 1)] = 1
    views_dir: Annotated[str, Option("directory of views that users write; NAME.sql with one SELECT")] = (
        "/etc/probingd/views.d"
    )


class ClusterConfig(NamedTuple):
    seeds: Annotated[
        tuple[str, ...],
        Option("nodes to contact first: HOST:PORT, dns:NAME:PORT for all addresses of a name, or unix:PATH"),
    ] = ()
    advertise: Annotated[
        str, Option("HOST:PORT at which other nodes reach this one; empty: listen, with the host name")
    ] = ""
    allow: Annotated[
        tuple[str, ...],
        Option(
            "networks in which addresses of other nodes are used, e.g. 10.0.0.0/8; empty: those of the seeds and of "
            "the interfaces of this machine"
        ),
    ] = ()
    labels: Annotated[
        tuple[str, ...], Option("labels of this node, e.g. rack=r7; `--where` chooses nodes by them")
    ] = ()
    heartbeat_s: Annotated[float, Option("seconds between two pings of a watched node", 0.05, 60)] = 1.0
    suspect_s: Annotated[float, Option("seconds without an answer after which a node is suspect", 0.1, 600)] = 2.0
    failed_s: Annotated[float, Option("seconds without an answer after which a node has failed", 0.2, 3600)] = 5.0
    trust_claims: Annotated[
        bool,
        Option("let every node that claims ranks of a job take part in its diagnosis, even without proof"),
    ] = False
    bandwidth_test_bytes: Annotated[
        int,
        Option(
            "most bytes that `preflight --bandwidth` sends to a peer, and that a peer may send here; 0: none",
            0,
            1 << 32,
        ),
    ] = 0


class ProbesConfig(NamedTuple):
    bpffs: Annotated[str, Option("directory of the pins, on a BPF file system")] = "/sys/fs/bpf/probingd"
    force_fallback: Annotated[bool, Option("attach by perf events even if the kernel has uprobe_multi")] = False
    hit_budget: Annotated[
        int, Option("most hits per second and CPU that one process may make of a probe; further hits are refused", 1)
    ] = 50_000
    ring_bytes: Annotated[
        int, Option("bytes of the ring of collectives, a power of two; an operation takes 300", 1 << 16)
    ] = 16 << 20
    recordings: Annotated[
        str, Option("directory for recordings of the rings' records; empty: no recordings are made")
    ] = ""
    fuse: Annotated[bool, Option("probe libraries on FUSE, too; a FUSE server that hangs can then stop all forks")] = (
        False
    )
    user_dir: Annotated[str, Option("directory of probes that users write; NAME.toml with NAME.c")] = (
        "/etc/probingd/probes.d"
    )


class SamplingConfig(NamedTuple):
    hz: Annotated[int, Option("samples of Python stacks per second and CPU; 0: no sampling", 0, 999)] = 19
    off_cpu: Annotated[bool, Option("sample also the time in which threads are off the CPU")] = True
    ring_bytes: Annotated[
        int, Option("bytes of the ring of samples, a power of two; a sample takes 2 KB; 0: by the number of CPUs", 0)
    ] = 0
    risk_freeze: Annotated[bool, Option("sample even on kernels that sampling is known to freeze")] = False
    torch_modules: Annotated[
        bool, Option("sample which torch module each trainer runs; a sample costs a CPU about a millisecond")
    ] = False
    torch_modules_interval_s: Annotated[
        float, Option("mean of the seconds between two samples of a trainer's torch modules", 0.1, 60)
    ] = 1.0


class VariablesConfig(NamedTuple):
    watch: Annotated[
        tuple[str, ...],
        Option("variables of trainers to be read and stored, as dotted names; at most 64", most=MAX_WATCHED),
    ] = ()
    interval_s: Annotated[float, Option("seconds between two readings of the watched variables", 0.1)] = 1.0


class HostConfig(NamedTuple):
    cpu_interval_s: Annotated[float, Option("seconds between two rows of the CPU of a process", 0.1)] = 1.0
    memory_interval_s: Annotated[float, Option("seconds between two rows of the memory of a process", 0.1)] = 10.0
    node_interval_s: Annotated[
        float, Option("seconds between two rows of memory, disks and pressure of the node", 0.1)
    ] = 5.0
    kernel_log: Annotated[str, Option("the kernel's log; empty: it is not read")] = "/dev/kmsg"


class NetConfig(NamedTuple):
    interval_s: Annotated[float, Option("seconds between two rows of a network interface or RDMA port", 0.1)] = 5.0
    tcp: Annotated[bool, Option("store retransmits and round trips of the TCP connections of watched processes")] = True
    tcp_interval_s: Annotated[float, Option("seconds between two rows of the connections of a process", 0.1)] = 5.0
    sysfs: Annotated[
        str, Option("directory of sysfs, for RDMA ports; empty: sysfs as the first process of the node sees it")
    ] = ""


class GpuConfig(NamedTuple):
    enabled: Annotated[bool, Option("read GPUs by NVIDIA's driver, in a process of its own")] = True
    interval_s: Annotated[float, Option("seconds between two readings of the GPUs", 0.1)] = 1.0
    links_interval_s: Annotated[float, Option("seconds between two rows of an NVLink or PCIe link", 1)] = 10.0
    call_timeout_s: Annotated[float, Option("seconds after which a call into the driver counts as hung", 0.1)] = 5.0
    library: Annotated[str, Option("path of libnvidia-ml.so.1; empty: as the loader finds it")] = ""
    sysfs: Annotated[str, Option("directory of sysfs, for PCI devices and NICs")] = "/sys"


class CudaConfig(NamedTuple):
    syncs: Annotated[bool, Option("store calls in which threads wait for the GPU")] = True
    memory: Annotated[bool, Option("store the allocations of GPU memory, by stack and size")] = True
    memory_interval_s: Annotated[float, Option("seconds between two rows of an allocating stack", 1)] = 10.0
    launches: Annotated[
        bool, Option("count the launches of CUDA kernels; each launch then costs the job a microsecond more")
    ] = False


class NcclConfig(NamedTuple):
    ras: Annotated[bool, Option("ask NCCL's RAS for the states of the ranks")] = True
    ras_port: Annotated[int, Option("port that NCCL's RAS listens on", 1, 65535)] = 28028
    ras_interval_s: Annotated[float, Option("seconds between two questions to RAS", 1)] = 60.0
    flight_recorder: Annotated[bool, Option("read the dumps of PyTorch's flight recorder that jobs write")] = True


class LogsConfig(NamedTuple):
    enabled: Annotated[bool, Option("store lines of trainers on stdout and stderr that match a pattern")] = False
    patterns: Annotated[tuple[str, ...], Option("texts that a line has to contain to be stored")] = (
        "NCCL WARN",
        "unhandled system error",
        "unhandled cuda error",
        "Traceback (most recent call last)",
        "out of memory",
        "CUDA error",
        "Error:",
        "Exception",
        "KeyboardInterrupt",
        "Watchdog caught collective operation timeout",
    )
    lines_per_s: Annotated[int, Option("most lines per second and process that are stored", 1)] = 20
    line_bytes: Annotated[int, Option("most bytes of a line that are stored", 64, 4096)] = 512


class JobRowsConfig(NamedTuple):
    enabled: Annotated[bool, Option("read the rows that jobs report by `import probing`")] = True


class LabelsConfig(NamedTuple):
    enabled: Annotated[bool, Option("read the labels that jobs give their ranks, and accept them as datagrams")] = True


class DiagnoseConfig(NamedTuple):
    enabled: Annotated[
        bool, Option("search for problems of jobs all the time, and store them in diagnosis.findings")
    ] = True
    stall_s: Annotated[float, Option("seconds without progress after which a job counts as stalled", 0.5, 3600)] = 10.0
    compile_s: Annotated[
        float, Option("seconds that the label phase=compile may last before the job can count as stalled", 0, 3600)
    ] = 1800.0
    eval_s: Annotated[
        float, Option("seconds that the label phase=eval may last before the job can count as stalled", 0, 3600)
    ] = 1800.0
    checkpoint_s: Annotated[
        float, Option("seconds that the label phase=checkpoint may last before the job can count as stalled", 0, 3600)
    ] = 900.0
    review_s: Annotated[
        float, Option("seconds to the first review of a job that advances; later reviews are rarer", 1, 86400)
    ] = 60.0
    hook: Annotated[
        str,
        Option("command to run for each new finding, which it gets as JSON on stdin; not run by a shell", hidden=True),
    ] = ""
    webhook: Annotated[
        str, Option("URL to which each new finding is posted as JSON; the list of processes shows it", hidden=True)
    ] = ""
    hook_timeout_s: Annotated[
        float, Option("seconds after which the command is killed or the post given up", 0.1, 600)
    ] = 10.0

    @property
    def phase_limits(self) -> dict[str, float]:
        """Returns the time limits of the phases that have a limit of their own, s. Keys: values of the label
        ``phase``.
        """
        return {"compile": self.compile_s, "eval": self.eval_s, "checkpoint": self.checkpoint_s}


class InjectConfig(NamedTuple):
    enabled: Annotated[
        bool, Option("let callers with the scope admin run code in the processes that jobs and users list")
    ] = False
    jobs: Annotated[tuple[str, ...], Option("jobs in whose processes code may be run; * for all")] = ()
    users: Annotated[
        tuple[str, ...], Option("users in whose processes code may be run, names or numbers; * for all but root")
    ] = ()


class GroupsConfig(NamedTuple):
    enabled: Annotated[
        bool, Option("let launchers of users on this node start the ranks of groups, see docs/groups.md")
    ] = False


class Config(NamedTuple):
    """All options. ``Config.load`` and ``Config.from_args`` check each value and raise ConfigError."""

    node_name: Annotated[str, Option("name of this node in every row; empty: the host name")] = ""
    instance: Annotated[str, Option("name that separates the pins of several daemons on one machine")] = "default"
    state_dir: Annotated[str, Option("directory of the log and the segments")] = "/var/lib/probingd"
    socket: Annotated[str, Option("Unix socket that probingctl talks to")] = "/run/probingd/probingd.sock"
    runtime_dir: Annotated[
        str, Option("directory of the daemon's internal sockets; empty: the path of the socket followed by .d")
    ] = ""
    cgroup: Annotated[
        str, Option("watch only processes of this control group, a path below the cgroup mount; empty: all processes")
    ] = ""
    hang_s: Annotated[
        float, Option("seconds after which a process of the daemon that hangs is replaced; 0: never", 0)
    ] = 30.0
    listen: Annotated[str, Option("HOST:PORT to listen on in addition to the socket; empty: no TCP")] = ""
    flight: Annotated[bool, Option("answer Arrow Flight SQL as well, on the socket and listen")] = False
    http: Annotated[str, Option("HOST:PORT that answers /metrics and /healthz by HTTP; empty: none")] = ""
    token_file: Annotated[
        str, Option("file with the token that TCP callers show; the service's user must be able to read it")
    ] = ""
    insecure: Annotated[bool, Option("allow TCP without a token, and without TLS outside of loopback")] = False
    calls_per_s: Annotated[
        float, Option("most calls per second of one address with one token over TCP; further calls are refused", 0.1)
    ] = 200.0
    tls: TlsConfig = TlsConfig()
    users: UsersConfig = UsersConfig()
    store: StoreConfig = StoreConfig()
    query: QueryConfig = QueryConfig()
    cluster: ClusterConfig = ClusterConfig()
    probes: ProbesConfig = ProbesConfig()
    sampling: SamplingConfig = SamplingConfig()
    variables: VariablesConfig = VariablesConfig()
    host: HostConfig = HostConfig()
    net: NetConfig = NetConfig()
    gpu: GpuConfig = GpuConfig()
    cuda: CudaConfig = CudaConfig()
    nccl: NcclConfig = NcclConfig()
    logs: LogsConfig = LogsConfig()
    job_rows: JobRowsConfig = JobRowsConfig()
    labels: LabelsConfig = LabelsConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    inject: InjectConfig = InjectConfig()
    groups: GroupsConfig = GroupsConfig()

    @property
    def public_socket(self) -> str:
        """The path of the socket for clients; under the supervisor, this path is a link to ``socket``."""
        inner = f"{self.runtime_dir}/{PUBLIC}"
        return self.runtime_dir.removesuffix(".d") if self.socket == inner else self.socket

    @property
    def control_socket(self) -> str:
        """The path of the socket on which the collector answers the service."""
        return f"{self.runtime_dir}/{CONTROL}/collector.sock"

    @property
    def pin_dir(self) -> str:
        return f"{self.probes.bpffs}/{self.instance}"

    @classmethod
    def load(cls, file: Path | None = None, overrides: Mapping[str, object] | None = None) -> Config:
        """Returns the configuration in ``file`` (None: in DEFAULT_FILE, if it exists), with ``overrides`` by dotted
        key.
        """
        values = dict(_flat(_read(file)))
        values.update(overrides or {})
        return _build(values)

    @classmethod
    def from_args(cls, args: Sequence[str], *, default_file: bool = False) -> Config:
        """Returns the configuration of a command line: ``--config FILE`` and ``--KEY VALUE`` or ``--KEY=VALUE``.

        Without ``--config`` no file is read unless ``default_file`` is set: a child process gets all values from its
        parent.
        """
        file: Path | None = None
        texts: dict[str, str] = {}
        for key, text in _pairs(args):
            if key == "config":
                file = Path(text)
            else:
                texts[key] = text
        overrides = {key: _parse(key, text) for key, text in texts.items()}
        if file is None and not default_file:
            return _build(overrides)
        return cls.load(file, overrides)

    def to_args(self) -> list[str]:
        """Returns a command line from which ``from_args`` makes this configuration again."""
        args = []
        for key, option in options():
            value = _get(self, key)
            if key == "node_name" or value != option.default:
                args.append(f"--{key}={_print(value)}")
        return args


def options() -> Iterator[tuple[str, Option]]:
    """Yields (dotted key, option) of all options."""
    yield from _OPTIONS.items()


def _options_of(section: type[Any], prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yields (dotted key, option) of a class and of the sections in it."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        if hasattr(kind, "_fields"):
            yield from _options_of(kind, f"{name}.")
        else:
            (option,) = kind.__metadata__
            yield f"{prefix}{name}", option._replace(default=section._field_defaults[name])


_OPTIONS = dict(_options_of(Config))


def checked_text(key: str, text: str) -> Any:
    """Parses ``text``, the value of option ``key`` on the command line. Raises ConfigError."""
    if key not in _OPTIONS:
        raise _unknown(key)
    return _checked(key, _parse(key, text))


def is_collected(key: str) -> bool:
    """Returns whether option ``key`` only affects what is collected: a change then deletes no stored row."""
    return key.partition(".")[0] in _COLLECTED


def text_of(config: Config, key: str) -> str:
    """Returns the value of option ``key`` as text for the command line."""
    return _print(_get(config, key))


def shown(config: Config) -> Iterator[dict[str, str]]:
    """Yields a row of ``probing.config`` for each option."""
    for key, option in options():
        value, default = text_of(config, key), _print(option.default)
        if key == "socket":
            value = config.public_socket
        elif option.hidden and value != default:
            value = "(set)"
        yield {"key": key, "value": value, "default": default, "doc": option.doc}


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _print(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _unknown(key: str) -> ConfigError:
    sections = sorted({f"[{known.split('.')[0]}]" for known in _OPTIONS if "." in known})
    # Imported late, since most processes get options that were already checked.
    import difflib

    near = difflib.get_close_matches(key, [*_OPTIONS, *sections], n=1, cutoff=0.5)
    near = near or [known for known in _OPTIONS if known.split(".")[-1] == key.split(".")[-1]]
    hint = f"did you mean {near[0]}?" if near else "docs/config.md lists the keys"
    return ConfigError(f"unknown configuration key {key[:80]!r}", hint=hint)


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word[:80]!r}", hint="options start with --")
        key, given, text = word[2:].partition("=")
        key = key.replace("-", "_")
        if key != "config" and key not in _OPTIONS:
            raise _unknown(key)
        if not given:
            if key != "config" and isinstance(_OPTIONS[key].default, bool):
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise ConfigError(f"--{key} needs a value", hint=f"for example --{key}=VALUE")
        yield key, text


def _parse(key: str, text: str) -> object:
    default = _OPTIONS[key].default
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise _wrong(key, text, "true or false")
        return text == "true"
    if isinstance(default, tuple):
        return [part for part in text.split(",") if part]
    if isinstance(default, str):
        return text
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError as e:
        raise _wrong(key, text, "a whole number" if isinstance(default, int) else "a number") from e


def _wrong(key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{key} = {str(value)[:80]!r} is wrong", hint=f"it must be {wanted}")


def _read(file: Path | None) -> dict[str, Any]:
    try:
        with open(file or DEFAULT_FILE, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as e:
        if file is None:
            return {}
        raise ConfigError(f"no configuration file {file}", hint="check the path given as --config") from e
    except OSError as e:
        hint = "it must be a file that the daemon's user can read"
        raise ConfigError(f"cannot read {file or DEFAULT_FILE}: {e.strerror}", hint=hint) from e
    if len(data) > MAX_FILE_BYTES:
        hint = f"at most {MAX_FILE_BYTES} bytes are read"
        raise ConfigError(f"{file or DEFAULT_FILE} is too long", hint=hint)
    try:
        return toml.loads(data.decode())
    except ValueError as e:
        text = str(e).replace("\n", " ")
        hint = "docs/config.md has an example"
        raise ConfigError(f"{file or DEFAULT_FILE} is not TOML: {text}", hint=hint) from e


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if not isinstance(value, dict):
            yield name, value
        elif any(key.startswith(f"{name}.") for key in _OPTIONS):
            yield from ((f"{name}.{inner}", v) for inner, v in value.items())
        else:
            raise _unknown(name)


def _build(values: Mapping[str, object]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key not in _OPTIONS:
            raise _unknown(key)
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = _checked(key, value)
    top = sections.pop("", {})
    for section, given in sections.items():
        top[section] = Config._field_defaults[section]._replace(**given)
    return _whole(Config(**top))


def _checked(key: str, value: object) -> Any:
    option = _OPTIONS[key]
    default = option.default
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise _wrong(key, value, "a list of texts")
        if len(value) > (longest := int(min(option.most, MAX_ENTRIES))):
            hint = f"leave {len(value) - longest} of them out"
            raise ConfigError(f"{key} has {len(value)} entries, and {longest} are the most", hint=hint)
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
        raise _wrong(key, value, names[type(default)])
    least = option.least
    if least is not None and isinstance(value, (int, float)):
        most = option.most
        if not value >= least:
            raise _wrong(key, value, f"at least {least:.12g}")
        if value > most:
            raise _wrong(key, value, f"at most {most:.12g}")
    return value


def _whole(config: Config) -> Config:
    node_name = config.node_name or _socket.gethostname()
    if not re.fullmatch(r"[\w.:@-]{1,255}", node_name):
        raise _wrong("node_name", node_name, "letters, digits and . : @ _ -")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", config.instance):
        raise _wrong("instance", config.instance, "at most 32 letters, digits, _ and -")
    socket = str(Path(config.socket.removeprefix("unix:")).absolute())
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH and not config.runtime_dir:
        raise _wrong("socket", socket, f"a path of at most {MAX_SOCKET_PATH} bytes")
    for name in ("collector", "service", "worker", "group"):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", getattr(config.users, name)):
            raise _wrong(f"users.{name}", getattr(config.users, name), "a name or a number")
    if config.listen:
        _address("listen", config.listen)
    if config.http:
        _address("http", config.http)
    _cluster(config.cluster)
    _hooks(config.diagnose)
    return config._replace(
        node_name=node_name,
        socket=socket,
        runtime_dir=str(Path(config.runtime_dir or f"{socket}.d").absolute()),
        state_dir=str(Path(config.state_dir).absolute()),
        probes=config.probes._replace(bpffs=str(Path(config.probes.bpffs).absolute())),
    )


def _cluster(cluster: ClusterConfig) -> None:
    for seed in cluster.seeds:
        if not seed.startswith("unix:"):
            _address("cluster.seeds", seed.removeprefix("dns:"))
    if cluster.advertise:
        _address("cluster.advertise", cluster.advertise)
    for network in cluster.allow:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise _wrong("cluster.allow", network, "a network, as 10.0.0.0/8 or fd00::/8") from None
    for label in cluster.labels:
        if not re.fullmatch(r"[A-Za-z0-9][\w./-]{0,62}=[\w./:+-]{0,63}", label, re.ASCII):
            raise _wrong("cluster.labels", label, "KEY=VALUE of letters, digits and . _ / -, at most 63 each")
    keys = {label.partition("=")[0] for label in cluster.labels}
    if len(keys) < len(cluster.labels) or len(keys) > MAX_LABELS:
        raise _wrong("cluster.labels", ", ".join(cluster.labels), f"at most {MAX_LABELS} labels with different keys")
    if not cluster.heartbeat_s <= cluster.suspect_s < cluster.failed_s:
        raise _wrong("cluster.suspect_s", cluster.suspect_s, "at least cluster.heartbeat_s and below cluster.failed_s")


def _hooks(diagnose: DiagnoseConfig) -> None:
    try:
        words = shlex.split(diagnose.hook)
    except ValueError:
        words = [""]
    if words and not Path(words[0]).is_absolute():
        raise _wrong("diagnose.hook", diagnose.hook, "a command with an absolute path, as /usr/local/bin/page --team x")
    if diagnose.webhook and not re.fullmatch(r"https?://[\w.\[\]:-]+([/?][!-~]*)?", diagnose.webhook, re.ASCII):
        raise _wrong("diagnose.webhook", diagnose.webhook, "an http or https URL")


def _address(key: str, text: str) -> None:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise _wrong(key, text, "HOST:PORT, an IPv6 address in brackets")
