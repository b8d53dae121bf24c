"""When work on a CUDA stream was done, against a double that knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_support import Cuda

from probing.daemon.bpf.session import Session
from probing.daemon.source import Identity


@pytest.fixture
def cuda(tmp_path: Path, open_session: Callable[..., Session]) -> Iterator[Cuda]:
    made = Cuda(tmp_path, open_session)
    yield made
    made.close()


def by_id(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "an operation was closed twice"
    return found


WATCHDOG = """
s, pending, over = stream(), [], threading.Event()
def watch():
    while not over.is_set() or pending:
        for number, e in list(pending):
            if cuda.cudaEventQuery(e) == 0:
                pending.remove((number, e))
        time.sleep(0.001)
witness()
watcher = threading.Thread(target=watch); watcher.start()
for number in range(30):
    e = event()
    op(s, number)
    record(e, s)
    pending.append((number, e))
for number in range(30):
    ops.open_gate(number + 1)
    time.sleep(0.003)
over.set(); watcher.join()
say(ends=[ops.end_of(number) for number in range(30)])
"""


def test_the_polls_of_another_thread_enclose_the_true_end(cuda: Cuda) -> None:
    (said,) = cuda.run(WATCHDOG)
    rows = by_id(cuda.closed())
    assert not cuda.open()
    assert {(row["state"], row["timing"]) for row in rows.values()} == {("done", "watchdog")}
    for number, end in enumerate(said["ends"]):
        assert rows[number]["lo"] <= end <= rows[number]["hi"]
        assert rows[number]["call"] < rows[number]["launch"] < rows[number]["hi"]
    # The first one waited for its gate while it was asked for.
    assert sum(row["lo"] > 0 for row in rows.values()) >= 1


def test_what_is_behind_an_unfinished_operation_is_not_done_either(cuda: Cuda) -> None:
    script = cuda.script("""
s, e, f = stream(), event(), event()
witness()
op(s, 0); record(e, s)
op(s, 1); record(f, s)
assert cuda.cudaEventQuery(e) == 600
say(asked=time.monotonic_ns())
wait()
ops.open_gate(2)
cuda.cudaEventSynchronize(f)
say(ends=[ops.end_of(0), ops.end_of(1)])
""")
    asked = script.step()["asked"]
    assert {row["state"] for row in cuda.open().values()} == {"launched"}
    ends = script.step()["ends"]
    rows = by_id(cuda.closed())
    assert rows[0]["lo"] == rows[1]["lo"]
    assert 0 < rows[0]["lo"] < asked < ends[0]
    assert [rows[number]["timing"] for number in (0, 1)] == ["sync", "sync"]
    assert rows[0]["hi"] == rows[1]["hi"] > ends[1]


def test_a_caller_that_polls_itself_is_recognized(cuda: Cuda) -> None:
    cuda.run("""
s, e = stream(), event()
witness()
op(s, 0); record(e, s)
ops.open_gate(1)
while cuda.cudaEventQuery(e): pass
op(s, 1); ops.open_gate(2)
while cuda.cudaStreamQuery(s): pass
""")
    rows = by_id(cuda.closed())
    assert [(rows[n]["state"], rows[n]["timing"]) for n in (0, 1)] == [("done", "blocking_wait")] * 2


@pytest.mark.parametrize("call", ["cudaStreamSynchronize(s)", "cudaDeviceSynchronize()", "cudaEventSynchronize(e)"])
def test_five_thousand_operations_and_one_sync(cuda: Cuda, call: str) -> None:
    (said,) = cuda.run(f"""
cuda.cudaSetDevice(0)
s, e = stream(), event()
witness()
ops.open_gate(5000)
for number in range(5000): op(s, number)
record(e, s)
ok(cuda.{call})
say(returned=time.monotonic_ns(), ends=[ops.end_of(number) for number in range(5000)])
""")
    before = len(cuda.closed())
    assert before == 5000 - 1024 + 256
    assert cuda.source.close_rest() == 1024 - 256
    rows = by_id(cuda.closed())
    assert len(rows) == 5000
    assert not cuda.open()
    assert Counter((row["state"], row["timing"]) for row in rows.values()) == {
        ("unseen", "enqueue_only"): 5000 - 1024,
        ("done", "sync"): 1024,
    }
    for number in range(5000 - 1024, 5000):
        assert said["ends"][number] <= rows[number]["hi"] <= said["returned"]
    assert not len(cuda.session.maps["cuda_rests"].items()[0])


def test_threads_that_close_the_same_operations_close_each_once(cuda: Cuda) -> None:
    cuda.run("""
s = stream()
witness()
ops.open_gate(6000)
def sync():
    for _ in range(300): ok(cuda.cudaStreamSynchronize(s))
threads = [threading.Thread(target=sync) for _ in range(3)]
for thread in threads: thread.start()
for number in range(6000): op(s, number)
for thread in threads: thread.join()
op(s, 6000); ops.open_gate(6001)
ok(cuda.cudaStreamSynchronize(s))
""")
    cuda.source.close_rest()
    rows = by_id(cuda.closed())
    assert len(rows) + len(cuda.open()) == 6001
    assert not cuda.open()
    assert cuda.session.counters()["collectives"] == {"pushed": 6001, "lost": 0}


def test_operations_beyond_the_share_of_a_process_are_rows_at_once(cuda: Cuda) -> None:
    script = cuda.script("""
streams = [stream() for _ in range(5)]
witness()
for place, s in enumerate(streams):
    for number in range(1000): op(s, 1000 * place + number)
say(); wait()
ops.open_gate(5000)
for s in streams: ok(cuda.cudaStreamSynchronize(s))
say()
""")
    script.step()
    assert sorted(cuda.open()) == list(range(4096))
    assert {(row["state"], row["timing"], row["position"]) for row in cuda.closed()} == {("unseen", "enqueue_only", 0)}
    script.step()
    cuda.source.close_rest()
    rows = by_id(cuda.closed())
    assert not cuda.open()
    assert Counter(row["state"] for row in rows.values()) == {"done": 4096, "unseen": 904}
    assert cuda.session.counters()["collectives"] == {"pushed": 5000, "lost": 0}


def test_without_a_witness_nothing_lies_open(cuda: Cuda) -> None:
    script = cuda.script("""
s = stream()
op(s, 0)
say()
wait()
witness()
op(s, 1)
say()
""")
    script.step()
    assert [(row["state"], row["timing"], row["position"]) for row in cuda.closed()] == [("unseen", "enqueue_only", 0)]
    script.step()
    assert [(row["state"], row["position"]) for row in cuda.open().values()] == [("called", 1)]


def test_an_event_that_is_recorded_again_says_nothing_of_what_it_stood_behind(cuda: Cuda) -> None:
    script = cuda.script("""
a, b, e = stream(), stream(), event()
witness()
op(a, 5); record(e, a)
op(b, 0); record(e, b)
ops.open_gate(1)
while cuda.cudaEventQuery(e): pass
say()
wait()
record(e, stream())
ok(cuda.cudaEventSynchronize(e))
say()
""")
    script.step()
    assert [row["id"] for row in cuda.closed()] == [0]
    assert list(cuda.open()) == [5]
    script.step()
    assert list(cuda.open()) == [5]


def test_an_event_of_another_thread_is_not_behind_a_call_that_is_under_way(cuda: Cuda) -> None:
    script = cuda.script("""
s, e = stream(), event()
witness()
ops.open_gate(1)
thread = threading.Thread(target=lambda: op(s, 0)); thread.start(); thread.join()
record(e, s)
ok(cuda.cudaEventSynchronize(e))
say()
""")
    script.step()
    assert [row["state"] for row in cuda.open().values()] == ["called"]


def test_a_group_is_on_the_stream_when_it_is_launched(cuda: Cuda) -> None:
    script = cuda.script("""
s, e, f = stream(), event(), event()
witness()
ops.open_gate(9)
op(s, 0, group=7); op(s, 1, group=7)
record(e, s)
ok(cuda.cudaEventSynchronize(e))
say()
wait()
ops.launched(s, 1); ops.launched(s, 2)
record(f, s)
ok(cuda.cudaEventSynchronize(f))
say()
""")
    script.step()
    assert {row["state"] for row in cuda.open().values()} == {"called"}
    script.step()
    rows = by_id(cuda.closed())
    assert {(row["state"], row["launch"] > 0) for row in rows.values()} == {("done", True)}
    assert len(rows) == 2


def test_an_event_behind_a_large_group_covers_all_of_it(cuda: Cuda) -> None:
    """As all_to_all makes them: two operations for each rank."""
    script = cuda.script("""
s, e = stream(), event()
witness()
ops.open_gate(600)
for group in (7, 8):
    first = 200 * (group - 7)
    for number in range(first, first + 200): op(s, number, group=group)
    for number in range(first, first + 200): ops.launched(s, number + 1)
    record(e, s)
    ok(cuda.cudaEventSynchronize(e))
    say(); wait()
# Of a group that is not launched yet, none is done.
for number in range(400, 600): op(s, number, group=9)
record(e, s)
ok(cuda.cudaEventSynchronize(e))
say()
""")
    for count in (200, 400):
        script.step()
        cuda.source.close_rest()
        assert not cuda.open()
        assert Counter((row["state"], row["timing"]) for row in cuda.closed()) == {("done", "sync"): count}
    script.step()
    assert sorted(cuda.open()) == list(range(400, 600))


def test_large_groups_in_turn_all_end(cuda: Cuda) -> None:
    cuda.run("""
s = stream()
witness()
ops.open_gate(12800)
for group in range(100):
    e, first = event(), 128 * group
    for number in range(first, first + 128): op(s, number, group=group + 1)
    for number in range(first, first + 128): ops.launched(s, number + 1)
    record(e, s)
    while cuda.cudaEventQuery(e): pass
""")
    rows = by_id(cuda.closed())
    assert not cuda.open()
    assert Counter((row["state"], row["timing"]) for row in rows.values()) == {("done", "blocking_wait"): 12800}


def test_captured_operations_are_named_as_such(cuda: Cuda) -> None:
    cuda.run("""
s, t, graph = stream(), stream(), P()
witness()
op(t, 3)
ok(cuda.cudaStreamBeginCapture(P(s), 2))
assert op(s, 0) == 1
ok(cuda.cudaStreamEndCapture(s, ctypes.byref(graph)))
assert cuda.cudaStreamEndCapture(s, ctypes.byref(graph)) != 0
op(t, 4)
ops.open_gate(5)
ok(cuda.cudaStreamSynchronize(t))
""")
    rows = by_id(cuda.closed())
    found = {number: (row["state"], row["timing"]) for number, row in rows.items()}
    assert found == {0: ("unseen", "graph"), 3: ("done", "sync"), 4: ("done", "sync")}


@pytest.mark.parametrize("call", ["cudaStreamSynchronize(s)", "cudaEventQuery(e)", "cudaDeviceSynchronize()"])
def test_an_error_of_the_device_fails_what_was_open(cuda: Cuda, call: str) -> None:
    cuda.run(f"""
cuda.cudaSetDevice(0)
s, e = stream(), event()
witness()
op(s, 0); op(s, 1); record(e, s)
cuda.cudartDoubleFail(700)
assert cuda.{call} == 700
ops.open_gate(9)
""")
    rows = by_id(cuda.closed())
    assert [(row["state"], row["error"]) for row in rows.values()] == [("failed", "cudaError 700")] * 2


def test_a_mistaken_call_fails_nothing(cuda: Cuda) -> None:
    script = cuda.script("""
s, e = stream(), event()
witness()
op(s, 0); record(e, s)
cuda.cudartDoubleFail(400)
assert cuda.cudaEventQuery(e) == 400
assert cuda.cudaStreamSynchronize(s) == 400
cuda.cudartDoubleFail(0)
say()
""")
    script.step()
    assert list(cuda.open()) == [0]
    assert not cuda.closed()


def test_implicit_streams_are_followed_where_the_device_is_known(cuda: Cuda) -> None:
    script = cuda.script("""
e = event()
witness()
op(None, 0)
ok(cuda.cudaSetDevice(1))
op(None, 1, device=1)
op(None, 2, device=0)
record(event(), None)
assert cuda.cudaSetDevice(99) != 0
op(None, 3, device=1)
say()
wait()
ops.open_gate(9)
ok(cuda.cudaStreamSynchronize(None))
say()
""")
    script.step()
    assert sorted(cuda.open()) == [1, 3]
    assert {row["id"]: row["state"] for row in cuda.closed()} == {0: "unseen", 2: "unseen"}
    script.step()
    assert {row["id"]: row["state"] for row in cuda.closed()} == {0: "unseen", 2: "unseen", 1: "done", 3: "done"}


def test_a_device_is_waited_for_without_the_streams_of_others(cuda: Cuda) -> None:
    script = cuda.script("""
ok(cuda.cudaSetDevice(1)); b = stream()
ok(cuda.cudaSetDevice(0)); a = stream()
witness()
ops.open_gate(1)
op(a, 0); op(b, 5, device=1)
ok(cuda.cudaDeviceSynchronize())
say()
""")
    script.step()
    assert [row["id"] for row in cuda.closed()] == [0]
    assert list(cuda.open()) == [5]


def test_a_destroyed_stream_takes_its_open_operations_along(cuda: Cuda) -> None:
    cuda.run("""
s = stream()
witness()
for number in range(300): op(s, number)
ops.open_gate(300)
ok(cuda.cudaStreamDestroy(s))
""")
    assert len(cuda.closed()) == 256
    cuda.source.close_rest()
    rows = by_id(cuda.closed())
    assert {(row["state"], row["timing"]) for row in rows.values()} == {("unseen", "enqueue_only")}
    assert len(rows) == 300


def test_a_process_that_ended_leaves_nothing_behind(cuda: Cuda) -> None:
    script = cuda.script("witness()\nop(stream(), 0)")
    script.step()
    pid = script.process.pid
    _, values = cuda.session.maps["cuda_processes"].items()
    start_ns = int(values[0]["start_ns"])
    script.close()
    cuda.source.process_exited(Identity(pid, start_ns, "job", "run", "trainer"))
    cuda.source.round(cuda.clock.pair())
    assert [len(cuda.session.maps[name].items()[0]) for name in ("cuda_processes", "cuda_streams")] == [0, 0]


def test_what_events_mean_is_not_believed_after_their_probes_were_off(cuda: Cuda) -> None:
    script = cuda.script("""
a, b, e = stream(), stream(), event()
witness()
op(a, 5); record(e, a)
ops.open_gate(1)
op(b, 0)
say(); wait()
record(e, b)
while cuda.cudaEventQuery(e): pass
say(); wait()
while cuda.cudaEventQuery(e): pass
say(); wait()
ok(cuda.cudaStreamSynchronize(b))
say()
""")
    script.step()
    off = (cuda.clock.pair().mono_ns, 1, 0)
    slot = next(slot for slot, name in cuda.source.slots.items() if name == "cuda_event_record cudaEventRecord")
    budgets = cuda.session.maps["budgets"]
    budgets.update(slot, off)
    script.step()
    assert sorted(cuda.open()) == [0, 5]
    cuda.source.round(cuda.clock.pair())
    cuda.session.set_budget(slot, 0)
    script.step()
    assert sorted(cuda.open()) == [0, 5]
    script.step()
    assert sorted(cuda.open()) == [5]


def test_a_pause_voids_what_events_and_devices_were(cuda: Cuda) -> None:
    script = cuda.script("""
ok(cuda.cudaSetDevice(0))
a, b, e = stream(), stream(), event()
witness()
op(a, 5); record(e, a)
say(); wait()
record(e, b)
ok(cuda.cudaSetDevice(1))
say(); wait()
while cuda.cudaEventQuery(e): pass
op(None, 1, device=0)
say()
""")
    script.step()
    cuda.session.pause(True)
    script.step()
    cuda.session.pause(False)
    script.step()
    assert sorted(cuda.open()) == [5]
    assert [(row["id"], row["state"]) for row in cuda.closed()] == [(1, "unseen")]


def test_a_stream_for_which_nobody_asks_is_given_up(cuda: Cuda) -> None:
    script = cuda.script("""
quiet, other = stream(), stream()
witness()
for number in range(100): op(quiet, number)
op(other, 200); record(event(), other)
say(); wait()
op(quiet, 100)
say(); wait()
assert cuda.cudaStreamQuery(quiet) == 600
op(quiet, 101)
say()
""")
    script.step()
    assert cuda.source.give_up(1, 10) == 0
    assert len(cuda.open()) == 101
    assert cuda.source.give_up(11, 10) == 100
    script.step()
    rows = by_id(cuda.closed())
    assert sorted(rows) == list(range(101))
    assert {(row["state"], row["timing"]) for row in rows.values()} == {("unseen", "enqueue_only")}
    script.step()
    assert sorted(cuda.open()) == [101, 200]
