"""Parses text reports of NCCL's RAS, the only form of versions 2.24 to 2.28.3, into rows of ``comm.ras``.

A text report lists groups of communicators, and for each communicator only the ranks that differ from most others. So
only these ranks have rows, and a healthy job has no rows. The wording is from src/ras/client_support.cc
(rasClientRunComms) at v2.24.3-1 and v2.28.3-1.
"""

from __future__ import annotations

import re

from probing.api.errors import CorruptTarget
from probing.daemon.nccl_uprobes.ras.report import MAX_ROWS, OPERATION_COUNTS, RankRow, Report
from probing.daemon.processes.procfs import clean_text

__all__ = ("text_report",)

MAX_LINES = 200_000
MAX_LISTED = 1_024
# The columns for each value of statusStr. statusStr is the first status that applies to a rank (rasClientRunComms).
_STATUS: dict[str, RankRow] = {
    "ABORT": {"abort_flag": True},
    "FINALIZE": {"abort_flag": False},
    "RUNNING": {"init_state": "Success", "finalize_called": False, "destroy_flag": False, "abort_flag": False},
    "INIT": {"init_state": "INIT", "finalize_called": False, "destroy_flag": False, "abort_flag": False},
    # The process answered and does not have the communicator; before 2.26 also: the process did not answer.
    "NOCOMM": {"missing": True, "unresponsive": False},
    "UNKNOWN": {"missing": True},
}
_N = r"([0-9]{1,9})"
_WHERE = rf"GPU {_N}(?: \(NVML {_N}\))? managed by process {_N} on node (\S+)"
_VERSION = re.compile(r"NCCL version (\S+)")
_TIME = re.compile(
    r"(?:Gathering data about the NCCL communicators .*|Communicators)\.\.\. \(([0-9]{1,9}\.[0-9]{1,9})s\)"
)
_TIMEOUTS = re.compile(rf"  Encountered {_N} communication timeouts?")
_GROUP = re.compile(rf" *{_N} +{_N} +{_N} +\S+ +{_N} +{_N} +[A-Z]+ +\S+")
_COMM = re.compile(rf"#{_N}-{_N} \(([0-9a-f]{{16}})\) (INCOMPLETE|ERROR|MISMATCH)")
_PROCESS = re.compile(rf"  Process {_N} on node (\S+) managing GPUs? .*")
_LISTED = re.compile(r"  The (missing|unknown) ranks?: ([0-9,]+)")
_LONE_UNKNOWN = re.compile(rf"  Rank {_N} has status (UNKNOWN)")
_DIFFERENT = re.compile(r"  Communicator ranks have different (?:([A-Za-z]+) operation counts|status|.*)")
_ERRORS = re.compile(r"  (Initialization|Asynchronous) errors? on .*")
_MANY = re.compile(rf"  {_N} ranks (reported .*|have .*)")
_ONE = re.compile(rf"  Rank {_N}(?: (reported .*?|has .*?))? -- (?:{_WHERE}|\[process information not found\])")
_REPORTED = re.compile(r"reported (.{1,64})")
_HAS_STATUS = re.compile(r"ha(?:s|ve) status ([A-Z]+)")
_LAUNCHED = re.compile(r"ha(?:s|ve) launched up to operation ([0-9]{1,18})")
_NOT_LAUNCHED = re.compile(r"ha(?:s|ve) not launched any operations")


def text_report(report: bytes) -> Report:
    """Returns the rows of the ranks in the report. Raises CorruptTarget if ``report`` is not a report of RAS."""
    lines = report.decode("utf-8", "replace").split("\n")
    reader = _Reader()
    for line in lines[:MAX_LINES]:
        reader.line(line.rstrip("\r"))
    if reader.version is None:
        raise CorruptTarget("the answer is not a report of NCCL RAS")
    return {"rows": reader.rows(), "skipped": reader.skipped + max(0, len(lines) - MAX_LINES)}


class _Reader:
    def __init__(self) -> None:
        self.version: str | None = None
        self.skipped = 0
        self._collection_ns: int | None = None
        self._timeouts = 0
        self._sizes: dict[int, int] = {}
        self._found: dict[tuple[str, str, int], RankRow] = {}
        self._comm: tuple[str, str, str] | None = None
        self._dead: set[tuple[int, str]] | None = None
        self._gone: set[tuple[int, str]] = set()
        # The columns that all ranks in the next lines share, and the name of the column whose values the next lines
        # give.
        self._common: RankRow = {}
        self._about: str | None = None

    def rows(self) -> list[RankRow]:
        rows: list[RankRow] = []
        for (group, comm, rank), facts in self._found.items():
            common: RankRow = {
                "comm": comm,
                "size": self._sizes.get(int(group.partition("-")[0])),
                "comm_rank": rank,
                "missing": False,
                "nccl_version": self.version,
                "collection_ns": self._collection_ns,
                "timeouts": self._timeouts,
            }
            dead = {"considered_dead": True} if (facts.get("rank_pid"), facts.get("host")) in self._gone else {}
            rows.append({**common, **facts, **dead})
        return sorted(rows, key=lambda row: (not row["missing"], row["comm"], row["comm_rank"]))

    def line(self, line: str) -> None:
        if match := _COMM.fullmatch(line):
            self._comm, self._common, self._about = (f"{match[1]}-{match[2]}", match[3], match[4]), {}, None
            self._dead = None
        elif self._comm is not None and line.startswith("  "):
            self._communicator_line(line, self._comm)
        else:
            self._general_line(line)

    def _general_line(self, line: str) -> None:
        if not line:
            # Empty lines also separate the operations of one communicator.
            self._dead = None
            return
        if not line.startswith(" "):
            self._comm = None
        if line == "DEAD":
            self._dead = self._gone
        elif self._dead is not None and (match := _PROCESS.fullmatch(line)) and len(self._gone) < MAX_ROWS:
            self._dead.add((int(match[1]), _host(match[2])))
        elif match := _VERSION.match(line):
            self.version = self.version or clean_text(match[1], 64)
        elif match := _TIME.match(line):
            self._collection_ns = int(float(match[1]) * 1e9)
        elif match := _TIMEOUTS.match(line):
            self._timeouts = min(int(match[1]), (1 << 31) - 1)
        elif (match := _GROUP.fullmatch(line)) and len(self._sizes) < MAX_ROWS:
            self._sizes[int(match[1])] = int(match[4])

    def _communicator_line(self, line: str, comm: tuple[str, str, str]) -> None:
        if match := _ONE.fullmatch(line):
            self._rank(int(match[1]), {**self._facts(match[2]), **_where(match)}, comm)
        elif (match := _LISTED.fullmatch(line)) and len(match[2]) < MAX_LISTED * 8:
            for number in match[2].split(",")[:MAX_LISTED]:
                if number.isdigit() and len(number) < 10:
                    self._rank(int(number), {"missing": True}, comm)
        elif match := _LONE_UNKNOWN.fullmatch(line):
            self._rank(int(match[1]), _STATUS[match[2]], comm)
        elif match := _MANY.fullmatch(line):
            self._common = self._facts(match[2])
        elif match := _ERRORS.fullmatch(line):
            self._about = "init_state" if match[1] == "Initialization" else "async_error"
        elif match := _DIFFERENT.fullmatch(line):
            # Before 2.26 RAS counted all operations together; no column has this count.
            self._about = OPERATION_COUNTS.get(match[1] or "")
        elif line.startswith("  Missing communicator data from "):
            # The ranks listed next did not answer at all (2.26).
            self._common = {"missing": True, "unresponsive": True}
        else:
            self.skipped += 1

    def _facts(self, text: str | None) -> RankRow:
        """Returns the columns that ``text`` gives for a rank; without a text, the columns that listed ranks share."""
        if text is None:
            return self._common
        if match := _REPORTED.fullmatch(text):
            return {self._about: clean_text(match[1], 64)} if self._about else {}
        if match := _HAS_STATUS.fullmatch(text):
            return _STATUS.get(match[1], {})
        if match := _LAUNCHED.fullmatch(text):
            return {self._about: int(match[1])} if self._about else {}
        if _NOT_LAUNCHED.fullmatch(text):
            return {self._about: 0} if self._about else {}
        self.skipped += 1
        return {}

    def _rank(self, rank: int, facts: RankRow, comm: tuple[str, str, str]) -> None:
        group, name, _ = comm
        key = (group, name, rank)
        if key not in self._found and len(self._found) >= MAX_ROWS:
            self.skipped += 1
            return
        self._found.setdefault(key, {}).update(facts)


def _where(match: re.Match[str]) -> RankRow:
    if match[3] is None:
        return {}
    device = int(match[3])
    return {
        "cuda_device": device,
        "nvml_device": int(match[4]) if match[4] else device,
        "rank_pid": int(match[5]),
        "host": _host(match[6]),
    }


def _host(text: str) -> str:
    return clean_text(text, 64)
