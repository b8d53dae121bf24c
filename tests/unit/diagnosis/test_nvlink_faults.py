"""Errors of NVLink 5: what a line of the driver says, and several GPUs of a fabric that report them together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import ago, facts, history, node, rank

from probing.diagnosis.facts import Facts
from probing.diagnosis.hardware_facts import Gpu, Hardware, HardwareEvent
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, WARNING, Finding
from probing.diagnosis.xids import nvlink_error

WORDS = " 0x00000000 0x00000000 0x00000000 0x00000000)"
FABRIC = "1b0c9a52-0000-4000-8000-000000000001/3"


def line(code: int, rest: str) -> str:
    return f"NVRM: Xid (PCI:0009:01:00): {code}, {rest}"


LOST_PEER = line(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025025c6 0x00000000" + WORDS)
BAD_SIGNAL = line(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x004025c6 0x00000000" + WORDS)
CRASHED = line(145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 02 (0x00000087 0x00000008" + WORDS)


@pytest.mark.parametrize(
    ("text", "says", "resets"),
    [
        (LOST_PEER, "NVLink 9 went down (NETIR_LINK_DOWN, fatal, reason 37: its other end went down)", True),
        (BAD_SIGNAL, "NVLink 9 went down (NETIR_LINK_DOWN, fatal, reason 4: its signal is bad)", True),
        (CRASHED, "an error of NVLink 2 (RLW_SRC_TRACK, not fatal, status 0x8)", False),
        (line(149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x0" + WORDS), "an error of NVLink (NETIR, fatal)", True),
        # As drivers before R575 write it, and with the process in front.
        (
            line(149, "pid=4, name=python3, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]"),
            "NVLink 1 went down (NETIR_LINK_DOWN, fatal, injected by a test)",
            True,
        ),
        (
            line(149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 00 (0x00000013 0x00000000 0x00000000 0x00000000)"),
            "many bit errors of NVLink 0 (NETIR_BER_EVENT, not fatal)",
            False,
        ),
        (
            line(146, "TLW_RX/TLW_RX_PIPE1 Fatal XC0 i0 Link 03 (0x0000000b 0x00000004" + WORDS),
            "an error of NVLink 3 (TLW_RX_PIPE1, fatal, status 0x4)",
            True,
        ),
        (line(150, "MSE Degraded Fatal XC0 i0 Link -1 (0x0 0x0)"), "an error of NVLink (MSE Degraded, fatal)", True),
        # Lost packets: not fatal, and the GPU has to be reset all the same.
        (line(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x00000086 0x00000001" + WORDS), "RLW_RXPIPE, not fatal", True),
        (
            line(145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008" + WORDS),
            "RLW_RXPIPE, not fatal",
            False,
        ),
    ],
)
def test_a_line_of_the_driver_has_unit_severity_link_and_reason(text: str, says: str, resets: bool) -> None:
    error = nvlink_error(text)
    assert error is not None
    assert says in error.text
    assert error.resets is resets


@pytest.mark.parametrize(
    "text",
    ["", "Xid 149", line(79, "NETIR Fatal XC0 i0 Link 1 (0x0)"), line(149, "a" * 2000), line(149, "NETIR " * 300)],
)
def test_another_line_says_nothing_of_nvlink(text: str) -> None:
    assert nvlink_error(text) is None


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (LOST_PEER, "Look at the other end of NVLink 9 first, a switch or a GPU; then reset the GPU."),
        (
            LOST_PEER.replace("0x0250", "0x0230"),
            "Look at the other end of NVLink 9 first, a switch or a GPU, and at its",
        ),
        (BAD_SIGNAL, "Examine the signal, the connectors and the cables of NVLink 9; then reset the GPU."),
        (LOST_PEER.replace("0x0250", "0x0260"), "Find out which software or operator took NVLink 9 down."),
        (CRASHED, "Restart the job, or do what XID 154 asks for"),
        (line(144, "SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000004)"), "Nothing now"),
        (line(144, "SAW_MVB Fatal XC0 i0 Link 0 (0x00000001 0x00000002)"), "Drain the node and reset the GPU"),
    ],
)
def test_each_error_has_its_remedy(text: str, remedy: str) -> None:
    error = nvlink_error(text)
    assert error is not None
    assert error.remedy.startswith(remedy)


def event(gpu: int, text: str, since: float, code: int = 149) -> HardwareEvent:
    return HardwareEvent("kernel", "xid", ago(since), ago(since), 1, text, gpu, "0009:01:00", code)


def gpu(device: int, *ranks: int, **fields: object) -> Gpu:
    return replace(Gpu(device, ranks, "NVIDIA GB200", fabric=FABRIC, counts_nvlink=True), **fields)  # type: ignore[arg-type]


def job(*hardware: Hardware, clock_error_ns: int = 1_000_000) -> Facts:
    """Two ranks on each node, on its GPUs 0 and 1."""
    names = "abcd"[: len(hardware)]
    ranks = [
        rank(2 * at + n, *history(40, ago=0.5, every=0.1), node=name) for at, name in enumerate(names) for n in (0, 1)
    ]
    nodes = [
        replace(node(name), hardware=one, clock_error_ns=clock_error_ns)
        for name, one in zip(names, hardware, strict=True)
    ]
    return facts(*ranks, nodes=nodes)


def found(given: Facts) -> list[Finding]:
    return list(diagnose(given).findings)


def test_the_finding_of_one_gpu_names_the_unit_the_link_and_what_to_do() -> None:
    (finding,) = found(job(Hardware((gpu(0, 0), gpu(1, 1)), (event(0, BAD_SIGNAL, 30),))))
    assert (finding.verdict.id, finding.severity, [c.rank for c in finding.culprits]) == ("gpu_fault", ERROR, [0])
    assert finding.sentence == (
        "node a: GPU 0 reported XID 149, NVLink 9 went down (NETIR_LINK_DOWN, fatal, reason 4: its signal is bad),"
        " which rank 0 uses"
    )
    assert finding.next_steps[0].startswith("Examine the signal, the connectors and the cables of NVLink 9")


def test_a_number_without_its_line_is_a_warning() -> None:
    (finding,) = found(job(Hardware((gpu(0, 0),), (event(0, "Xid 149", 30),))))
    assert finding.severity == WARNING
    assert "XID 149, an error of NVLink 5 (NETIR)" in finding.sentence


def test_a_clique_whose_own_links_are_clean_has_a_fault_at_the_switch() -> None:
    first = Hardware((gpu(0, 0), gpu(1, 1)), (event(1, CRASHED, 29.6, 145), event(0, CRASHED, 29.8, 145)))
    second = Hardware((gpu(0, 2), gpu(1, 3)), (event(0, CRASHED.replace("Nonfatal", "Fatal"), 30, 145),))
    (finding,) = found(job(first, second))
    assert (finding.verdict.id, finding.severity) == ("fabric_fault", ERROR)
    assert finding.culprits == ()
    assert finding.victims == (0, 1, 2)
    assert finding.sentence == (
        "3 GPUs of nodes a and b of NVLink fabric 1b0c9a52-0000-4000-8000-000000000001/3 reported errors within 400 ms,"
        " first GPU 0 of node b: XID 145, an error of NVLink 2 (RLW_SRC_TRACK, fatal, status 0x8): no link of the GPUs"
        " themselves counts errors, so the fault is on the side of the switches; ranks 0-2 use them"
    )
    assert finding.since_ns == ago(30)
    assert finding.missing == ()
    # A hang of the job has the errors as evidence, and no node of the clique is blamed for it.
    assert finding.advice is not None
    assert finding.advice.action == "restart_without"


def test_a_link_whose_other_end_went_down_points_at_the_switch_whatever_is_counted() -> None:
    uncounted = [gpu(0, 0, counts_nvlink=None), gpu(1, 1, counts_nvlink=None)]
    (finding,) = found(job(Hardware(tuple(uncounted), (event(0, LOST_PEER, 30), event(1, LOST_PEER, 29)))))
    assert "the fault is at the other end of the links" in finding.sentence


def test_links_that_count_errors_themselves_leave_the_side_open() -> None:
    counts = HardwareEvent("gpu", "nvlink_errors", ago(31), ago(29), 3, "NVLink 9: crc_errors +3", 1)
    events = (event(0, BAD_SIGNAL, 30), event(1, BAD_SIGNAL, 29.9), counts)
    (finding,) = found(job(Hardware((gpu(0, 0), gpu(1, 1)), events)))
    assert "which one is not known" in finding.sentence
    assert "links of GPU 1 of node a count errors themselves" in finding.evidence


def test_clocks_that_may_differ_leave_the_first_error_open() -> None:
    first, second = (Hardware((gpu(0, at),), (event(0, LOST_PEER, 30 - at / 10),)) for at in (0, 2))
    (finding,) = found(job(first, second, clock_error_ns=5_000_000_000))
    assert "perhaps first GPU 0 of node a" in finding.sentence
    assert any(text.startswith("the order of the errors: the clocks of the nodes agree to") for text in finding.missing)
    (sure,) = found(job(first, second))
    assert sure.confidence == pytest.approx(finding.confidence + 0.1)


@pytest.mark.parametrize(
    ("other", "since"),
    [(gpu(1, 1, fabric=FABRIC[:-1] + "4"), 29.0), (gpu(1, 1), 300.0), (gpu(1, 1, fabric=None), 29.0)],
)
def test_gpus_of_different_cliques_or_times_are_no_fault_of_a_fabric(other: Gpu, since: float) -> None:
    events = (event(0, BAD_SIGNAL, 30), event(1, BAD_SIGNAL, since))
    findings = found(job(Hardware((gpu(0, 0), other), events)))
    assert [one.verdict.id for one in findings] == ["gpu_fault", "gpu_fault"]
