"""Equal stacks over ranks become one tree, and nothing is lost or invented on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from probing.client.render.rows import dump_json
from probing.client.stacks.merge import MAX_DEPTH, Group, Node, merge, plain_groups
from probing.client.stacks.text import members_text, trees_text

Spec = tuple[str, str, int | None]


def stack(rank: int | None, *outermost_first: Spec | str, **more: Any) -> dict[str, Any]:
    pid = 1000 + rank if rank is not None else 900
    frames = [f if isinstance(f, tuple) else (f, "train.py", 1) for f in outermost_first]
    shown = [{"func": f, "file": p, "lineno": n, "frame_type": "Python"} for f, p, n in reversed(frames)]
    return {
        "node": "a",
        "job": "j",
        "rank": rank,
        "pid": pid,
        "tid": pid,
        "thread": "MainThread",
        "trains": more.get("tid", pid) == pid,
        "complete": True,
        "frames": shown,
        **more,
    }


def paths(children: list[Node], ends: int) -> Iterator[tuple[Spec, ...]]:
    """The stacks that a tree stands for, outermost first, each as often as there are threads."""
    for _ in range(ends):
        yield ()
    for child in children:
        own = (child.func, child.file, child.lineno)
        for path in paths(child.children, len(child.ends)):
            yield (own, *path)


frame = st.tuples(st.sampled_from("fgh"), st.sampled_from(["x.py", ""]), st.sampled_from([1, 2, None]))
frames = st.lists(frame, max_size=5)
threads = st.lists(
    st.builds(
        lambda rank, tid, frames, complete, job: stack(rank, *frames, complete=complete, job=job, tid=tid),
        st.one_of(st.none(), st.integers(0, 9)),
        st.integers(1, 10**6),
        frames,
        st.booleans(),
        st.sampled_from("jk"),
    ),
    max_size=12,
    unique_by=lambda t: t["tid"],
)


@given(threads)
def test_a_tree_stands_for_exactly_the_stacks_it_is_made_of(given_threads: list[dict[str, Any]]) -> None:
    groups = merge(given_threads, every_thread=True)
    for job in "jk":
        wanted = Counter(
            tuple((f["func"], f["file"], f["lineno"]) for f in reversed(t["frames"]))
            for t in given_threads
            if t["job"] == job
        )
        got = Counter(p for g in groups if g.job == job for p in paths(g.children, len(g.ends)))
        assert got == wanted
    assert sum(len(g.members) for g in groups) == len(given_threads)


@given(threads)
def test_the_fewest_come_first_and_an_incomplete_stack_is_alone(given_threads: list[dict[str, Any]]) -> None:
    def check(nodes: list[Node]) -> None:
        assert [(not n.complete, len(n.members)) for n in nodes] == sorted(
            (not n.complete, len(n.members)) for n in nodes
        )
        for node in nodes:
            assert node.complete or len(node.members) == 1
            check(node.children)

    for group in merge(given_threads, every_thread=True):
        check(group.children)


@given(threads)
def test_text_and_json_name_every_rank(given_threads: list[dict[str, Any]]) -> None:
    groups = merge(given_threads, every_thread=True)
    ranks = {t["rank"] for t in given_threads if t["rank"] is not None}
    plain = json.loads(dump_json(plain_groups(groups)))
    assert {rank for group in plain for rank in group["ranks"]} == ranks
    assert trees_text(groups).count("job ") == len(groups) == len(plain)


def test_the_rank_that_differs_stands_first() -> None:
    waiting = [stack(r, "main", "step", ("all_reduce", "dist.py", 9)) for r in range(7)]
    odd = stack(7, "main", ("__next__", "loader.py", 4), ("dataloader_wait", "loader.py", 70))
    torn = stack(8, "main", "step", complete=False)
    assert trees_text(merge([*waiting, odd, torn])) == (
        "job j  MainThread  ranks 0-8\n"
        "  ├─ [0-7] main (train.py:1)\n"
        "  │    ├─ [7] __next__ (loader.py:4)\n"
        "  │    │    dataloader_wait (loader.py:70)\n"
        "  │    └─ [0-6] step (train.py:1)\n"
        "  │         all_reduce (dist.py:9)\n"
        "  └─ [8] incomplete: main (train.py:1)\n"
        "       step (train.py:1)\n"
    )


def test_who_stopped_further_out_is_a_branch_of_its_own() -> None:
    text = trees_text(merge([*(stack(r, "main", "f") for r in (0, 1, 5)), stack(2, "main"), stack(None, "main")]))
    assert text == (
        "job j  MainThread  ranks 0-2,5 pid 900\n"
        "  main (train.py:1)\n"
        "  ├─ [2 pid 900] (innermost)\n"
        "  └─ [0-1,5] f (train.py:1)\n"
    )


def test_alone_incomplete_and_without_frames() -> None:
    assert trees_text(merge([stack(3, "f", complete=False)])) == (
        "job j  MainThread  rank 3  incomplete\n  f (train.py:1)\n"
    )
    assert trees_text(merge([stack(3)])) == "job j  MainThread  rank 3\n  (no Python frame)\n"
    assert trees_text([]) == ""


def test_other_threads_are_grouped_by_name_whatever_their_number() -> None:
    main = [stack(r, "main") for r in range(2)]
    workers = [stack(r, "run", tid=50 + r, thread=f"Thread-{r + 1} (work)") for r in range(2)]
    assert [g.thread for g in merge([*main, *workers])] == ["MainThread"]
    groups = merge([*main, *workers], every_thread=True)
    assert [(g.thread, g.ranks) for g in groups] == [("MainThread", [0, 1]), ("Thread-* (work)", [0, 1])]


def test_two_threads_of_one_rank_are_two() -> None:
    twice = [stack(0, "run", "a", tid=51, thread="w"), stack(0, "run", "b", tid=52, thread="w")]
    (group,) = merge(twice, every_thread=True)
    assert (len(group.members), group.ranks) == (2, [0])
    assert [len(child.members) for child in group.children[0].children] == [1, 1]


def test_deep_recursion_stays_a_tree_that_can_be_written() -> None:
    deep = [*(("f", "a.py", 1) for _ in range(20_000))]
    other = [*deep[:10_000], ("g", "a.py", 2), *deep[10_001:]]
    groups = merge([stack(0, *deep), stack(1, *deep), stack(2, *other)])
    assert depth(groups[0]) <= MAX_DEPTH
    # The frames that are left out differ, so the stacks do.
    assert "└─ [0-1] (19802 frames left out)" in trees_text(groups)
    assert json.loads(dump_json(plain_groups(groups)))[0]["threads"] == 3


def depth(group: Group) -> int:
    level, count = group.children, 0
    while level:
        level, count = [child for node in level for child in node.children], count + 1
    return count


def test_names_cannot_drive_the_terminal() -> None:
    evil = "\x1b[31m\u202e"
    text = trees_text(merge([stack(0, (evil, evil, 1), job=evil, thread=evil), stack(1, "f", job=evil, thread=evil)]))
    assert not set(text) & {"\x1b", "\u202e"}


def test_members_are_ranges() -> None:
    assert members_text([0, 1, 2, 5], []) == "0-2,5"
    assert members_text([], [7]) == "pid 7"
    assert members_text([1], [7, 9]) == "1 pids 7,9"


def test_main_threads_are_one_group_whatever_the_kernel_calls_them() -> None:
    groups = merge([stack(0, "f", thread="python3"), stack(1, "f", thread="train.py")])
    assert [(g.thread, g.ranks) for g in groups] == [("MainThread", [0, 1])]
