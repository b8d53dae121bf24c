"""What the source of processes does with the kernel's events."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from probing.daemon.clock import ClockPair
from probing.daemon.collector.lifecycle import EXEC, EXIT, FORK, OOM, Lifecycle

RECORD = np.dtype([(name, "u8") for name in ("type", "tgid", "start_ns", "ktime", "ppid", "exit_code")])


@pytest.mark.parametrize(
    ("kind", "looked_at"), [(FORK, []), (EXEC, [23]), (EXIT, [23]), (OOM, [])], ids=["fork", "exec", "exit", "oom"]
)
def test_files_are_looked_at_when_a_process_stops_mapping_them(kind: int, looked_at: list[int]) -> None:
    libraries = Mock()
    lifecycle = Lifecycle(Mock(), Mock(), libraries, Mock(), list)
    lifecycle.assemble(np.array([(kind, 23, 1, 2, 1, 0)], RECORD), ClockPair(0, 0, 0))
    assert [call.args[0] for call in libraries.changed.call_args_list] == looked_at
