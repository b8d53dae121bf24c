"""Ranks by titles and arguments, which anybody can write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.titles import Place, place_in_arguments, place_in_title, rank_in_grid, role_in_title


@pytest.mark.parametrize(
    ("title", "role", "coordinates"),
    [
        ("VLLM::Worker_TP3", "trainer", (0, 0, 0, 3)),
        ("VLLM::Worker_DP1_PP2_PCP0_TP3_DCP1_EP7", "trainer", (1, 2, 0, 3)),
        ("chat-7b::Worker_PP1_TP0", "trainer", (0, 1, 0, 0)),
        ("VLLM::Worker", "trainer", (0, 0, 0, 0)),
        ("VLLM::EngineCore", "engine", None),
        ("VLLM::EngineCore_DP1", "engine", None),
        ("VLLM::DPCoordinator", "other", None),
        ("VLLM::APIServer_2", "other", None),
        ("sglang::scheduler_DP1_PP1_ATTN_CP0_MOE_DP0_TP5_EP2", "trainer", (1, 5)),
        ("sglang::scheduler", "trainer", (0, 0)),
        ("sglang::detokenizer", "other", None),
        ("sglang::tokenizer_worker:4711", "other", None),
        ("sglang::data_parallel_controller", "launcher", None),
        ("ray::TrainController.run", "launcher", None),
        ("ray::RayTrainWorker.execute", "", None),
        ("my-trainer rank 3", "", (3,)),
        ("train [Rank=5]", "", (5,)),
        ("frank 3", "", None),
        ("python train.py", "", None),
        ("VLLM::Worker_TP3 or so", "", None),
        ("VLLM::Worker_TP99999999", "", None),
    ],
)
def test_titles(title: str, role: str, coordinates: tuple[int, ...] | None) -> None:
    place = place_in_title((title,))
    assert (role_in_title((title,)), place.coordinates if place else None) == (role, coordinates)


@pytest.mark.parametrize(("title", "size"), [("pretrain rank 3/8", 8), ("rank 3 of 4: step 7", 4), ("rank 3", None)])
def test_a_title_may_name_the_number_of_ranks(title: str, size: int | None) -> None:
    assert place_in_title((title,)) == Place("title", (3,), size)


@pytest.mark.parametrize("title", ["rank 3/2", "rank 3/3", "rank 123456789", f"rank 3/{1 << 25}"])
def test_a_title_that_claims_an_impossible_rank_names_none(title: str) -> None:
    assert place_in_title((title,)) is None


def test_only_a_title_is_read_as_one() -> None:
    assert place_in_title(("python", "VLLM::Worker_TP3")) is None
    assert place_in_title(()) is None
    assert role_in_title(()) == ""


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ("--local_rank=3", Place("local_rank", (3,))),
        ("--local-rank 3", Place("local_rank", (3,))),
        ("--rank 3 --world-size 8 --local_rank 1", Place("rank", (3,), 8)),
        ("--process_id=1 --num_processes=2", Place("process_id", (1,), 2)),
        ("--rank 3 --world_size 2 --local_rank 0", Place("local_rank", (0,))),
        ("--rank", None),
        ("--rank three", None),
        ("--rank -1", None),
        ("--ranks 3", None),
    ],
)
def test_arguments(arguments: str, place: Place | None) -> None:
    assert place_in_arguments(("python", "train.py", *arguments.split())) == place


def test_a_whole_grid_gives_ranks_in_the_order_of_its_dimensions() -> None:
    grid = [Place("TP", (dp, pp, 0, tp)) for dp in range(2) for pp in range(3) for tp in range(5)]
    found = [rank_in_grid(place, grid[::-1]) for place in grid]
    assert [(ranks.rank, ranks.world_size) for ranks in found if ranks] == [(n, 30) for n in range(30)]


@pytest.mark.parametrize(
    "places",
    [
        [(0, 0), (0, 1), (1, 0)],
        [(0, 0), (0, 0)],
        [(0, 8), (0, 9)],
        [],
    ],
)
def test_anything_but_a_whole_grid_gives_no_rank(places: list[tuple[int, int]]) -> None:
    grid = [Place("TP", place) for place in places]
    assert [rank_in_grid(place, grid) for place in [*grid, Place("TP", (0, 1, 2))]] == [None] * (len(grid) + 1)


def test_processes_of_different_kinds_are_no_grid() -> None:
    assert rank_in_grid(Place("a", (0,)), [Place("a", (0,)), Place("b", (1,))]) is None
    assert rank_in_grid(Place("a", (0,)), [Place("a", (0,)), Place("a", (1,), 2)]) is None
    vllm, sglang = place_in_title(("VLLM::Worker_TP0",)), place_in_title(("sglang::scheduler_TP1",))
    assert vllm is not None
    assert sglang is not None
    assert rank_in_grid(vllm, [vllm, sglang]) is None


@given(st.lists(st.text(max_size=80), max_size=4).map(tuple), st.text(max_size=80))
def test_any_command_line_has_a_sensible_rank_or_none(cmdline: tuple[str, ...], title: str) -> None:
    for place in (place_in_title((title,)), place_in_arguments(cmdline)):
        ranks = rank_in_grid(place, [place]) if place else None
        assert ranks is None or 0 <= ranks.rank < ranks.world_size
