"""The source of samples: from what the programs in the kernel saw (bpf/python.bpf.c) to rows with names and lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import CorruptTarget, InternalError, ProbingError, TargetTimeout
from probing.daemon.clock import ClockPair
from probing.daemon.processes.readers import Readers
from probing.daemon.python_stack.sampling.codes import MAX_ADDRESSES, CodeKey, unpack_codes
from probing.daemon.python_stack.sampling.decoder import Decoder
from probing.daemon.python_stack.sampling.enrolment import Enrolment, Kernel
from probing.daemon.python_stack.sampling.processes import NAME, KnownProcesses, Runtimes, Sampled
from probing.daemon.python_stack.sampling.rows import SampleRows
from probing.daemon.python_stack.sampling.watch import SampledWatch, Settings
from probing.daemon.source import Identity, Processes, Sink

__all__ = ("PythonSampler",)

ROLES = frozenset({"trainer", "data_loader"})
FETCH_S = 0.5
_log = logging.getLogger(__name__)


class PythonSampler:
    """A ``Source``, and a ``processes.announce.Listener``. Safe for any thread.

    ``assemble`` and ``ready`` are for the drain of the ring ``python_samples``.
    """

    name = NAME

    def __init__(
        self,
        kernel: Kernel,
        readers: Readers,
        runtimes: Runtimes,
        processes: Processes,
        sink: Sink,
        node: str,
        settings: Settings,
    ) -> None:
        self._kernel = kernel
        self._readers = readers
        self._known = KnownProcesses(runtimes)
        enrolment = Enrolment(kernel, readers, self._known, self._checks, sink.lost)
        self._watch = SampledWatch(enrolment, self._known, settings)
        self._rows = SampleRows(node, processes, self._known.find, sink)
        self._decoder: Decoder | None = None

    def start(self) -> None:
        """Raises ProbingError when the programs cannot be told. What the ring holds already is decoded first."""
        self._watch.start()
        self._decoder = Decoder(self._kernel.ring, self._known.find, self._fetch, self._watch.unresolved)
        self._decoder.start()

    def stop(self) -> None:
        """What is in the ring then stays there, for the next one."""
        self._watch.stop()
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.stop()

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Records of the ring ``python_samples`` -> physical batches of ``python.samples`` and ``python.stacks``."""
        return self._rows.assemble(records, pair)

    def ready(self) -> int:
        """The position in the ring up to which it may be drained."""
        decoder = self._decoder
        return self._kernel.ring.position if decoder is None else decoder.ready()

    @property
    def sampled(self) -> int:
        """How many processes are sampled now."""
        return self._watch.sampled

    @property
    def reason(self) -> str:
        """Why processes that should be sampled are not, each reason with its processes; empty when all are."""
        return self._watch.reason

    def settings_changed(self) -> None:
        """Ask for the settings of all processes again."""
        self._watch.settings_changed()

    def process_identified(self, who: Identity) -> None:
        if who.role in ROLES:
            self._watch.watch(who)
        else:
            self._watch.leave((who.pid, who.start_ns))

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self._watch.renew((pid, start_ns))

    def process_exited(self, who: Identity) -> None:
        self._watch.leave((who.pid, who.start_ns))

    def _fetch(self, process: Sampled, codes: list[CodeKey]) -> None:
        """Read code objects; those that are not there any more are given up, the others of a slow process left."""
        try:
            self._read(process, list(dict.fromkeys(address for address, _ in codes)))
        except (TargetTimeout, InternalError):
            return
        except ProbingError as e:
            _log.debug("code of process %d cannot be read: %s", process.key[0], e.message)
            if isinstance(e, CorruptTarget):
                self._known.unprepare(process)
        process.codes.give_up(process.codes.missing(codes, time.monotonic()))

    def _checks(self, process: Sampled, addresses: Sequence[int]) -> dict[int, int]:
        return dict(self._read(process, addresses))

    def _read(self, process: Sampled, addresses: Sequence[int]) -> list[CodeKey]:
        """Have the code at ``addresses`` learnt; what was there. Raises ProbingError, TargetTimeout for slow ones."""
        deadline = time.monotonic() + FETCH_S
        found: list[CodeKey] = []
        runtime, _ = self._known.prepared(process, FETCH_S)
        while addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TargetTimeout(f"code of process {process.key[0]} could not be read in time")
            answer = self._readers.call(
                "codes", pid=process.key[0], start_ns=process.key[1], timeout=left,
                runtime=runtime.to_dict(), addresses=addresses[:MAX_ADDRESSES], timeout_ms=int(left * 500),
            )  # fmt: skip
            codes = unpack_codes(answer)
            process.codes.learn(codes)
            found += codes
            addresses = addresses[max(1, int(answer.header["asked"])) :]
        return found
