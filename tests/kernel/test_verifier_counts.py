"""The work of the kernel's verifier over our programs does not grow unnoticed."""

from __future__ import annotations

import json
import os
import platform

import pytest
from verifier_record import RECORD, grown, series_of

from probing.daemon.bpf.capabilities import detect
from probing.daemon.bpf.verifier_statistics import stack_bytes, statistics


def test_no_program_grew_by_a_tenth() -> None:
    record = json.loads(RECORD.read_text())
    series = series_of(os.uname().release, platform.machine())
    if series not in record:
        pytest.skip(f"Linux {series} is not recorded")
    found = list(grown(statistics(detect()), record[series]))
    assert not found, f"{'; '.join(found)}: `make verifier-record` accepts it"


def test_both_variants_of_each_program_load() -> None:
    features = detect()
    plain, guarded = statistics(features.without("preempt")), statistics(features)
    assert plain.keys() == guarded.keys()
    assert all(plain[name].keys() == guarded[name].keys() for name in plain)


def test_the_stack_of_each_program_fits_on_every_kernel() -> None:
    stacks = stack_bytes(detect())
    assert {f"{name}.{program}" for name in stacks for program, size in stacks[name].items() if size > 512} == set()


def test_growth_and_new_programs_are_named() -> None:
    before = {"nccl": {"call": [1000, 10], "close": [100, 1]}}
    now = {"nccl": {"call": [1101, 10], "close": [110, 9]}, "new": {"other": [7, 1]}}
    assert list(grown(now, before)) == [
        "nccl.call grew from 1000 to 1101 instructions",
        "new.other is not recorded",
    ]
