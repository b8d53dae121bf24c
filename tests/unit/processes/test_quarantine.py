"""The quarantine of processes whose reads do not end."""

from __future__ import annotations

import time

import pytest

from probing.api.errors import TargetTimeout
from probing.daemon.processes.quarantine import MAX_QUARANTINE_S, Quarantines


def test_each_quarantine_in_a_row_lasts_twice_as_long_up_to_a_limit() -> None:
    quarantines = Quarantines()
    spans = []
    # A process can be blocked for weeks.
    for _ in range(1_100):
        quarantines.add(7, 11, "maps", 2.0)
        (held,) = quarantines.current()
        spans.append(held.until - held.since)
    assert [round(span, 6) for span in spans[:3]] == [2.0, 4.0, 8.0]
    assert spans[-1] == pytest.approx(MAX_QUARANTINE_S)


def test_what_is_left_of_a_quarantine() -> None:
    quarantines = Quarantines()
    assert quarantines.seconds_left(7, 11) == 0.0
    quarantines.add(7, 11, "maps", 60.0)
    assert 0.0 < quarantines.seconds_left(7, 11) <= 60.0
    with pytest.raises(TargetTimeout, match="in quarantine"):
        quarantines.refuse(7, 11)
    quarantines.add(8, 11, "maps", 0.0)
    time.sleep(0.001)
    assert quarantines.seconds_left(8, 11) == 0.0
    quarantines.refuse(8, 11)
    quarantines.end(7, 11)
    assert quarantines.seconds_left(7, 11) == 0.0
