"""Which kernels the sampler could freeze, by their releases."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.bpf import cpu_clock
from probing.daemon.bpf.cpu_clock import known_to_freeze, running_release

FREEZING = ["5.19.0", "5.19.17-1-generic", "6.0.0", "6.0.19", "6.1", "6.1.35-lts", "6.2.0", "6.2.16", "6.3.0", "6.3.9"]
SOUND = ["5.10.0-28-amd64", "5.18.19", "5.15.167", "6.1.36", "6.1.99", "6.3.10", "6.4.0", "6.18.44-fc", "7.2.0-rc1"]


@pytest.mark.parametrize("release", FREEZING)
def test_release_without_the_fix_is_named_with_a_reason(release: str) -> None:
    reason = known_to_freeze(release)
    assert reason is not None
    assert release in reason


@pytest.mark.parametrize("release", SOUND)
def test_release_with_the_fix_or_before_the_fault_is_not(release: str) -> None:
    assert known_to_freeze(release) is None


@given(st.text())
def test_any_text_is_an_answer(release: str) -> None:
    assert known_to_freeze(release) is None or release[0].isdigit()


class System:
    def __init__(self, release: str, version: str) -> None:
        self.release, self.version = release, version


@pytest.mark.parametrize(
    ("release", "version", "signature", "expected"),
    [
        ("6.1.0-23-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.99-1 (2024-07-15)", None, "6.1.99"),
        ("6.2.0-39-generic", "#40~22.04.1-Ubuntu SMP", "Ubuntu 6.2.0-39.40~22.04.1-generic 6.2.16\n", "6.2.16"),
        ("6.2.0-39-generic", "#40~22.04.1-Ubuntu SMP", "something else\n", "6.2.0-39-generic"),
        ("6.18.44", "#1 SMP", None, "6.18.44"),
    ],
)
def test_distributions_say_elsewhere_which_release_they_run(
    release: str,
    version: str,
    signature: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "version_signature"
    if signature is not None:
        path.write_text(signature)
    monkeypatch.setattr(os, "uname", lambda: System(release, version))
    monkeypatch.setattr(cpu_clock, "_SIGNATURE", path)
    assert running_release() == expected
