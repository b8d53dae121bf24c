"""Reads records of the kernel log from /dev/kmsg (Documentation/ABI/testing/dev-kmsg), and classifies them.

A record is ``PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,more];TEXT``, followed by lines that begin with a blank: its
properties. The kernel writes unprintable bytes as ``\\xNN``.

The meaning of a record is its kind, and the process, device and number that it names. The patterns are for messages of
Linux 5.10 to 6.18 and of NVIDIA's drivers; if two versions word a message differently, there is a pattern for each. A
line that no pattern matches is of kind other.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from probing.daemon.processes.procfs import clean_text

__all__ = ("KINDS", "Chunk", "KernelLog", "Meaning", "Record", "meaning_of", "parse_records")

# From kernel/printk: CONSOLE_EXT_LOG_MAX, PRINTK_MESSAGE_MAX. A shorter buffer gets EINVAL.
_BYTES = 8_192
MAX_TEXT = 2_048
_HEAD = re.compile(rb"(\d{1,4}),(\d{1,20}),(\d{1,18}),[^;\n]{0,256};")
_FACILITIES = (
    "kern",
    "user",
    "mail",
    "daemon",
    "auth",
    "syslog",
    "lpr",
    "news",
    "uucp",
    "cron",
    "authpriv",
    "ftp",
)
_LEVELS = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")


class Record(NamedTuple):
    """A record of the kernel log. ``boot_us``: its time on the clock of the log, us since boot. ``facility``: kern for
    records of the kernel itself; records that programs write have another facility."""

    seq: int
    boot_us: int
    facility: str
    level: str
    text: str


class Chunk(NamedTuple):
    """The result of a read. ``lost``: the number of records that were overwritten before they were read. ``more``:
    further records may wait.
    """

    records: tuple[Record, ...]
    lost: int
    more: bool


class KernelLog:
    """The kernel log from its oldest record on. Raises OSError if the log cannot be opened.

    ``path`` may also be a pipe or a file with the same lines.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._next: int | None = None
        self._tail = b""

    def close(self) -> None:
        os.close(self._fd)

    def read(self, most: int) -> Chunk:
        """Returns the next records, with at most ``most`` read calls. Never waits. Raises OSError."""
        found: list[Record] = []
        lost = 0
        for _ in range(most):
            try:
                data = os.read(self._fd, _BYTES)
            except BlockingIOError:
                return Chunk(tuple(found), lost, more=False)
            except OSError as e:
                # EPIPE: records were overwritten. The number of the next record shows how many were lost.
                if e.errno in (errno.EPIPE, errno.EINVAL):
                    continue
                raise
            if not data:
                return Chunk(tuple(found), lost, more=False)
            # A read from a pipe may end in the middle of a line.
            whole, _, self._tail = (self._tail + data).rpartition(b"\n")
            self._tail = self._tail[:_BYTES]
            for record in parse_records(whole):
                lost += self._gap(record.seq)
                found.append(record)
        return Chunk(tuple(found), lost, more=True)

    def _gap(self, seq: int) -> int:
        missing = seq - self._next if self._next is not None else 0
        self._next = seq + 1
        return max(0, missing)


def parse_records(data: bytes) -> Iterator[Record]:
    """Yields the records in ``data`` without their properties; other lines are left out."""
    for line in data.split(b"\n"):
        match = _HEAD.match(line)
        if match is None:
            continue
        priority = int(match[1])
        facility = priority >> 3
        yield Record(
            int(match[2]),
            int(match[3]),
            _FACILITIES[facility] if facility < len(_FACILITIES) else f"local{facility - 16}",
            _LEVELS[priority & 7],
            clean_text(line[match.end() :], MAX_TEXT),
        )


KINDS = {
    "oom_kill": "The kernel killed a process for lack of memory, of the node or of a control group.",
    "oom": "Memory ran out: lines about the process that asked for memory, and about the limit.",
    "xid": "NVIDIA's driver reports an error of a GPU; code is the XID.",
    "sxid": "An NVSwitch reports an error; code is the SXid.",
    "gpu": "Another fault of a GPU or its driver: a lost device, a failed start, a reset.",
    "memory_error": "The memory controller reports an error, corrected or uncorrected (EDAC).",
    "machine_check": "The processor or the firmware reports an error of the hardware.",
    "pcie_error": "An error of a PCIe device or link (AER), or a slot whose link went down.",
    "link_down": "A network port lost its link.",
    "link_up": "A network port has its link again.",
    "nic_error": "A network device or its driver failed: a queue that hangs, a firmware fault, a cable.",
    "disk_error": "A disk did not read or write, or does not answer.",
    "fs_error": "A file system is damaged, or became read-only.",
    "file_server": "A file server does not answer, or answers again.",
    "hung_task": "A task was blocked for minutes.",
    "lockup": "A CPU was stuck and did not schedule for a long time.",
    "thermal": "A processor is too hot and runs slower.",
    "segfault": "A process ended by a memory fault.",
    "page_allocation": "The kernel could not allocate memory for itself.",
    "kernel_bug": "The kernel itself failed.",
    "other": "Anything else.",
}
"""The meaning of each kind, in words."""


class Meaning(NamedTuple):
    """The meaning of a line. ``name``: the name of the process ``pid``."""

    kind: str
    pid: int | None = None
    name: str | None = None
    device: str | None = None
    code: int | None = None


_PCI = r"(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_PID = r"(?P<pid>\d{1,10})"
_NIC = r"(?P<device>(?!NIC\b)[A-Za-z][\w.\-@]{0,31})"
_TASK = rf"(?P<name>.{{1,64}}):{_PID}"
# Patterns in the order in which they are tried: more specific patterns come first. A process chooses its name, which
# may imitate the text of the kernel. So the pattern of a name is greedy: the name ends at the last occurrence of the
# text that follows a name. A name that begins the line may imitate any other line, and so may the file names in a line
# about a memory fault.
_OF_A_PROCESS = (
    ("segfault", rf"(?P<name>.{{1,64}})\[{_PID}\]: segfault at "),
    ("segfault", rf"traps: (?P<name>.{{1,64}})\[{_PID}\] (?:general protection|trap \w+)"),
    ("oom", r"(?P<name>.{1,64}) invoked oom-killer: "),
    ("page_allocation", r"(?P<name>.{1,64}): page allocation failure: order:(?P<code>\d{1,3})"),
)
_PATTERNS = (
    *_OF_A_PROCESS,
    ("xid", rf"NVRM: Xid \(PCI:{_PCI}\): (?P<code>\d{{1,5}})(?:, pid='?(?:{_PID}|[^,]*), name=(?P<name>[^,]*))?"),
    ("sxid", rf"nvidia-nvswitch\d*: SXid \(PCI:{_PCI}\): (?P<code>\d{{1,6}})"),
    ("gpu", rf"NVRM: GPU (?:at PCI:)?{_PCI}: GPU has fallen off the bus"),
    ("gpu", rf"NVRM: .*(?:RmInitAdapter failed|rm_init_adapter failed|GPU-[\w-]+ .*lost|GPU {_PCI}.*[Rr]eset)"),
    ("gpu", rf"amdgpu {_PCI}: .*(?:GPU reset|ring \S+ timeout|GPU fault|RAS)"),
    ("oom_kill", rf"(?:Memory cgroup )?[Oo]ut of memory.*?: Kill(?:ed)? process {_PID} \((?P<name>.{{0,64}})\)[, ]"),
    ("oom", rf"oom-kill:.*task=(?P<name>.{{0,64}}),pid={_PID},uid="),
    ("oom", rf"oom_reaper: reaped process {_PID} \((?P<name>.{{0,64}})\)"),
    ("pcie_error", rf"(?:\S+ )?{_PCI}: (?:AER|PCIe Bus Error)\b"),
    ("pcie_error", rf"(?:pcieport|pciehp) {_PCI}(?::pcie\d+)?: .*Link Down"),
    ("pcie_error", rf"(?:pcieport|pciehp) {_PCI}(?::pcie\d+)?: .*(?:DPC: containment event|device recovery failed)"),
    ("thermal", r".*(?:temperature|cpu clock|Package) .*(?:above threshold|throttled)"),
    ("memory_error", r"EDAC (?:\S+ )?MC\d+: (?P<code>\d{1,9}) [CU]E "),
    ("memory_error", r"Memory failure: 0x"),
    ("machine_check", r".*\[Hardware Error\]|mce: .*(?:Machine check|events logged)|Uhhuh\. NMI received"),
    ("link_down", rf"(?:\S+ [0-9a-f:.]+ )?{_NIC}: (?:NIC )?Link (?:is )?[Dd]own\b"),
    ("link_up", rf"(?:\S+ [0-9a-f:.]+ )?{_NIC}: (?:NIC )?Link (?:is )?[Uu]p\b"),
    ("link_down", rf"\w+: \(slave {_NIC}\): link status definitely down"),
    ("link_up", rf"\w+: \(slave {_NIC}\): link status definitely up"),
    ("link_down", r"(?:infiniband )?(?P<device>\w+_\d+): Port: (?P<code>\d{1,3}) Link (?:DOWN|INIT)"),
    ("link_up", r"(?:infiniband )?(?P<device>\w+_\d+): Port: (?P<code>\d{1,3}) Link ACTIVE"),
    ("nic_error", rf"NETDEV WATCHDOG: (?:CPU: \d+: )?{_NIC} \(.*transmit queue \d+ timed out"),
    (
        "nic_error",
        rf"(?:mlx\d_core|bnxt_en|ice|i40e|qede|ena) {_PCI}(?: \S+)?: .*"
        r"(?:health compromised|device's health|assert_var|[Cc]able (?:error|unplugged)|fatal error|TX timeout|"
        r"High temperature|temperature.*(?:warning|exceed)|recovery|poll_health)",
    ),
    (
        "disk_error",
        r"(?:blk_update_request: )?(?:I/O|critical \w+|protection) error, dev (?P<device>[\w!-]{1,32}), sector",
    ),
    ("disk_error", r"Buffer I/O error on (?:dev|device) (?P<device>[\w!-]{1,32})"),
    (
        "disk_error",
        r"nvme (?P<device>nvme\d+): (?:I/O .*timeout|I/O tag .*timeout|controller is down|Device not ready|"
        r"Removing after probe|Abort status)",
    ),
    ("disk_error", r"ata(?P<device>\d+(?:\.\d+)?): (?:failed command|SError|hard resetting|exception Emask)"),
    ("disk_error", r"sd \S+ \[(?P<device>\w{1,32})\] .*(?:Medium Error|Hardware Error|FAILED Result)"),
    ("fs_error", r"(?:EXT[234]-fs|BTRFS|F2FS-fs) (?:error|critical|warning)? ?\(device (?P<device>[\w!-]{1,32})\)"),
    ("fs_error", r"XFS \((?P<device>[\w!-]{1,32})\): .*(?:[Cc]orrupt|error|[Ss]hut(?:ting)? ?down|log I/O)"),
    ("fs_error", r".*Remounting filesystem read-only"),
    ("file_server", r"nfs: server (?P<device>\S{1,128}) (?:not responding|OK)"),
    ("file_server", r"(?:LustreError: |Lustre: .*(?:was lost|Connection restored))"),
    ("file_server", r"(?:libceph|ceph): .*(?:hung|socket closed|session lost)"),
    ("hung_task", rf"INFO: task {_TASK} blocked"),
    ("lockup", rf"(?:watchdog: )?BUG: soft lockup - CPU#(?P<code>\d{{1,5}}) stuck for .*\[{_TASK}\]"),
    ("lockup", r"(?:NMI )?watchdog: Watchdog detected hard LOCKUP on cpu (?P<code>\d{1,5})"),
    ("lockup", r"rcu: INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls?"),
    ("kernel_bug", r"BUG: |kernel BUG at |Kernel panic|general protection fault|Oops: |Unable to handle kernel"),
)
# Each line that matches a pattern contains one of these words. Most lines contain none of the words, which saves trying
# the patterns.
_HINT = re.compile(
    r"NVRM|SXid|amdgpu|memory|oom|AER|PCIe|pcie|threshold|throttled|EDAC|Hardware Error|mce|NMI|[Ll]ink|"
    r"NETDEV WATCHDOG|health|assert_var|[Cc]able|fatal error|TX timeout|temperature|recovery|rror, dev|Buffer I/O|"
    r"nvme|ata\d|\[sd|-fs|BTRFS|XFS|read-only|nfs:|Lustre|ceph|blocked|lockup|LOCKUP|rcu|segfault|traps|"
    r"allocation failure|BUG|panic|protection fault|Oops|Unable to handle"
)
# A line that begins with the name and pid of a process, or with the path of its program. The kernel cuts a name after
# 15 bytes. Every user can cause such lines, for example "memfd_create() called without MFD_EXEC".
_BEGINS_WITH_PROCESS = re.compile(r"(?:.|\\x[0-9a-f]{2}){1,15}(?:\[\d{1,10}\]| \(\d{1,10}\))[: ]|process '")
_OTHER = Meaning("other")
_RULES = [(kind, re.compile(pattern)) for kind, pattern in _PATTERNS]
_RULES_OF_A_PROCESS = _RULES[: len(_OF_A_PROCESS)]


def meaning_of(text: str) -> Meaning:
    """Returns the meaning of a line that the kernel itself wrote."""
    if not _HINT.search(text):
        return _OTHER
    for kind, pattern in _RULES_OF_A_PROCESS if _BEGINS_WITH_PROCESS.match(text) else _RULES:
        if (match := pattern.match(text)) is not None:
            found = match.groupdict()
            pid, code = found.get("pid"), found.get("code")
            return Meaning(
                kind,
                _bounded(pid) if pid else None,
                found.get("name") or None,
                found.get("device"),
                _bounded(code) if code else None,
            )
    return _OTHER


def _bounded(word: str) -> int | None:
    number = int(word)
    return number if number < 1 << 31 else None
