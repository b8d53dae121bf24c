"""The vocabulary: each verdict says all, each situation is recognised, and the page is that of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from probing.diagnosis.ladder import RULES
from probing.diagnosis.verdict import Verdict
from probing.diagnosis.vocabulary import GENERAL, SITUATIONS, Situation, page, verdicts

ROOT = Path(__file__).resolve().parents[3]
GROUPS = {"hang", "slow", "death", "memory", "numbers", "hardware", "general"}

# The tests that show each verdict.
SHOWN_BY = {
    "rank_dead": ("test_a_rank_that_is_gone_is_named",),
    "rank_unreachable": ("test_ranks_on_a_node_that_does_not_answer_are_unreachable",),
    "communicator_error": (
        "test_an_asynchronous_error_names_the_rank_that_had_it_first",
        "test_an_abort_names_the_rank_that_did_not_join",
        "test_the_first_error_of_its_own_is_to_blame",
        "test_after_an_abort_the_rank_that_did_not_join_is_to_blame",
    ),
    "deadlock": (
        "test_two_groups_in_opposite_order_are_a_deadlock",
        "test_a_ring_of_sends_is_a_deadlock",
        "test_the_rank_that_keeps_a_file_lock_and_waits_for_those_that_want_it_is_named",
    ),
    "rank_died": (
        "test_a_killed_rank_and_those_that_wait_for_it",
        "test_who_died_of_it",
        "test_a_rank_that_exits_early_with_0",
    ),
    "fabric_fault": ("test_a_clique_whose_own_links_are_clean_has_a_fault_at_the_switch",),
    "gpu_fault": (
        "test_a_gpu_that_fails_is_an_error_of_the_ranks_that_use_it",
        "test_classes_of_xids",
    ),
    "gpu_throttled": ("test_a_throttled_gpu_is_why_its_rank_is_slow",),
    "network_fault": ("test_a_port_with_errors_is_named_with_its_ranks",),
    "packet_loss": ("test_a_path_that_loses_packets_is_named",),
    "storage_fault": ("test_a_full_shared_memory_is_named",),
    "host_fault": ("test_what_the_kernel_reports_is_a_warning",),
    "phase": ("test_a_phase_within_its_limit_is_a_note",),
    "idle": (
        "test_an_idle_server_is_a_note",
        "test_ranks_that_wait_for_the_one_that_receives_requests_are_idle",
    ),
    "init_stuck": (
        "test_the_rank_that_has_not_come_to_init_is_named",
        "test_a_world_that_is_not_whole_waits_in_init",
    ),
    "job_slowdown": (
        "test_all_ranks_are_slower_and_what_they_do_more",
        "test_a_real_change_is_found_where_it_is",
    ),
    "rank_lingers": (
        "test_a_rank_that_stays_is_a_note_and_later_a_warning",
        "test_what_a_rank_that_stays_waits_for_is_shown",
    ),
    "memory_growth": (
        "test_a_leak_is_named_before_it_ends",
        "test_ranks_of_a_node_share_its_memory",
    ),
    "memory_imbalance": ("test_a_rank_with_twice_the_memory",),
    "operation_mismatch": (
        "test_rank_0_alone_broadcasts",
        "test_one_batch_less_is_a_barrier_among_all_reduces",
    ),
    "size_mismatch": ("test_sizes_that_differ_name_the_smaller_part",),
    "dtype_mismatch": ("test_types_that_differ_name_the_smaller_part",),
    "root_mismatch": ("test_roots_that_differ_name_the_smaller_part",),
    "mixed_devices": ("test_gpus_of_two_models_are_a_note",),
    "no_completion": ("test_all_joined_and_none_completes",),
    "not_joined": (
        "test_the_rank_that_has_not_joined_is_named",
        "test_a_chain_of_groups_leads_to_the_rank_at_its_end",
        "test_the_true_culprit_is_found_exactly",
        "test_the_rank_that_keeps_a_file_lock_elsewhere_is_named",
    ),
    "bad_values": (
        "test_a_loss_that_is_no_number_any_more",
        "test_the_rank_on_which_it_was_first_is_named",
        "test_a_jump",
    ),
    "stuck_outside": (
        "test_ranks_that_block_outside_are_named",
        "test_the_smaller_group_outside_is_named",
        "test_the_rank_that_serves_a_request_is_named",
        "test_what_all_ranks_do_together_is_a_note_for_a_minute",
        "test_operations_in_flight_that_nobody_is_seen_to_wait_for_are_reported_after_twice_the_time",
    ),
    "unmatched_p2p": ("test_a_send_without_a_receive_names_the_sender",),
    "rotating_straggler": ("test_a_straggler_that_rotates_is_uneven_data",),
    "passed_straggler": ("test_a_rank_that_was_slow_for_a_while",),
    "shifted_sequence": ("test_a_swallowed_exception_shifts_the_sequence",),
    "slow_rank": (
        "test_the_one_slow_rank_is_named",
        "test_a_rank_that_waits_for_the_slow_one_in_another_group_is_its_victim",
        "test_more_of_the_same_code_is_uneven_work",
        "test_a_neighbour_on_its_cpu_is_named",
    ),
}


@cache
def functions_of_tests() -> frozenset[str]:
    paths = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for path in paths for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.M))


@pytest.mark.parametrize("verdict", verdicts(), ids=lambda verdict: verdict.id)
def test_each_verdict_says_all_of_itself(verdict: Verdict) -> None:
    assert verdict.id.isidentifier()
    assert verdict.id.islower()
    assert verdict.group in GROUPS
    for text in (verdict.title, verdict.rule, verdict.evidence, verdict.confidence, verdict.refuted_by):
        assert text.strip() == text != ""
    assert not verdict.title.endswith(".")
    assert set(verdict.situations) <= {situation.id for situation in SITUATIONS}
    if verdict not in GENERAL:
        assert verdict.next_steps
        assert SHOWN_BY.get(verdict.id), "name the tests that show it in SHOWN_BY"
    assert set(SHOWN_BY.get(verdict.id, ())) - functions_of_tests() == set(), "SHOWN_BY names tests that do not exist"


def test_no_two_rules_give_one_verdict_two_meanings() -> None:
    given = {verdict for rule in RULES for verdict in rule.VERDICTS}
    assert len({verdict.id for verdict in given}) == len(given)


def test_ids_of_situations_are_unique() -> None:
    assert len({situation.id for situation in SITUATIONS}) == len(SITUATIONS)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.id)
def test_each_situation_is_recognised_by_a_verdict_or_says_by_what(situation: Situation) -> None:
    recognised = {name for verdict in verdicts() for name in verdict.situations}
    assert situation.id in recognised or situation.shown_by


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "verdicts.md").read_text() == page(), "run `make docs`"


def test_the_page_has_each_verdict_and_each_situation() -> None:
    lines = page().split("\n")
    assert [line[4:] for line in lines if line.startswith("### ")] == [verdict.id for verdict in in_order()]
    assert {line[2:].partition(" | ")[0] for line in lines} >= {situation.text for situation in SITUATIONS}


def in_order() -> list[Verdict]:
    groups = ["hang", "death", "slow", "memory", "numbers", "hardware", "general"]
    return sorted(verdicts(), key=lambda verdict: groups.index(verdict.group))
