"""Records, which nodes publish about themselves, and claims, which nodes make about the state of other nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from probing.api.errors import PeerError

__all__ = ("MAX_INCARNATION", "MAX_JOBS", "Claim", "Proof", "Record", "Update", "bucket_of", "checked_record", "key_of")

MAX_JOBS = 64
MAX_LABELS = 16
MAX_LABEL_BYTES = 1024
# The largest incarnation that is accepted; honest nodes use the Unix time of their start, plus 1 for each change.
MAX_INCARNATION = 1 << 48
BUCKETS = 64
_NAME = re.compile(r"[\w.:@-]{1,255}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]{1,64}\]|[\w.-]{1,253}):(\d{1,5})", re.ASCII)
_UNIX = re.compile(r"unix:/[!-~]{1,107}")
_KEY = re.compile(r"[A-Za-z0-9][\w./-]{0,62}", re.ASCII)
_VALUE = re.compile(r"[\w./:+-]{0,63}", re.ASCII)
_VERSION = re.compile(r"[\w.+-]{0,32}", re.ASCII)


class Claim(IntEnum):
    """The state that a claim gives a node. If two claims are about the same incarnation, the state that is later in
    this list wins.
    """

    ALIVE = 0
    SUSPECT = 1
    FAILED = 2


class Proof(IntEnum):
    """How a node proved its name. A later member of this list proves more than an earlier member."""

    # The node runs a version without keys.
    NONE = 0
    # The record is signed by the first key that this node received for the name.
    HEARD = 1
    # The node has answered a challenge of this node with that key.
    KEY = 2
    # The certificate of a TLS connection proved the name.
    CERTIFICATE = 3

    @property
    def word(self) -> str:
        """The word to print; empty for NONE."""
        return self.name.lower() if self else ""


class Record(NamedTuple):
    """The data that a node publishes about itself. ``uid``: a number that differs at each start of the node. ``jobs``:
    hashes of the jobs and runs with ranks on the node. ``incarnation`` rises with each change, so an older record is
    ignored.

    ``key``: the node's public key; ``signature``: the signature of all other fields with this key (``keys``). Both are
    empty for a node that runs a version without keys.
    """

    name: str
    address: str
    incarnation: int
    uid: int
    labels: tuple[tuple[str, str], ...] = ()
    jobs: tuple[int, ...] = ()
    version: str = ""
    engine: str = ""
    key: bytes = b""
    signature: bytes = b""

    @property
    def host(self) -> str:
        """The host of ``address``."""
        return self.address.rpartition(":")[0]

    @property
    def size(self) -> int:
        """An upper bound of the record's size in a message, bytes."""
        texts = len(self.name.encode()) + len(self.address) + len(self.version) + len(self.engine)
        signed = len(self.key) + len(self.signature)
        return 60 + texts + signed + 8 * len(self.jobs) + sum(len(k) + len(v) + 8 for k, v in self.labels)


class Update(NamedTuple):
    """A claim about a node. ``since_s``: when the claim was first made, Unix time. ``mark``: a hash that identifies the
    claim."""

    record: Record
    claim: Claim
    since_s: int
    mark: int
    size: int

    @classmethod
    def of(cls, record: Record, claim: Claim = Claim.ALIVE, since_s: int = 0) -> Update:
        text = f"{record.name}\n{record.incarnation}\n{record.uid}\n{claim:d}"
        return cls(record, claim, since_s, _hash(text), record.size)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The rank of the update. If two updates are about the same name, the update of higher rank wins."""
        return self.record.incarnation, self.claim, self.record.uid


def key_of(name: str) -> int:
    """Returns the 64-bit key that determines the position of the node ``name`` in the ring."""
    return _hash(name)


def bucket_of(key: int) -> int:
    return key % BUCKETS


def checked_record(record: Record, *, local: bool = False) -> Record:
    """Returns ``record``. Raises PeerError if a field is invalid. ``local``: the address may be a Unix socket."""
    address = _ADDRESS.fullmatch(record.address)
    if not _NAME.fullmatch(record.name):
        raise PeerError("a record has no valid name")
    if not (address and 0 < int(address[2]) < 65536) and not (local and _UNIX.fullmatch(record.address)):
        raise PeerError(f"the record of {record.name} has no valid address")
    if not 0 < record.incarnation < MAX_INCARNATION or not 0 < record.uid < 1 << 64:
        raise PeerError(f"the record of {record.name} has no valid incarnation")
    if len(record.jobs) > MAX_JOBS or not all(0 <= mark < 1 << 64 for mark in record.jobs):
        raise PeerError(f"the record of {record.name} has more than {MAX_JOBS} jobs")
    if not _VERSION.fullmatch(record.version) or not _VERSION.fullmatch(record.engine):
        raise PeerError(f"the record of {record.name} has no valid version")
    if (len(record.key), len(record.signature)) not in ((0, 0), (32, 64)):
        raise PeerError(f"the record of {record.name} has no valid key")
    if problem := _labels_problem(dict(record.labels)):
        raise PeerError(f"the record of {record.name}: {problem}")
    return record


def _labels_problem(labels: Mapping[str, str]) -> str:
    """Returns why ``labels`` are invalid; empty if they are valid."""
    if len(labels) > MAX_LABELS or sum(len(k) + len(v) for k, v in labels.items()) > MAX_LABEL_BYTES:
        return f"there are more than {MAX_LABELS} labels, or more than {MAX_LABEL_BYTES} bytes of them"
    wrong = next((k for k, v in labels.items() if not _KEY.fullmatch(k) or not _VALUE.fullmatch(v)), None)
    return "" if wrong is None else f"the label {wrong[:63]!r} or its value is malformed"


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
