"""Who waits: by operations, by Python and native frames, and by both."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_cases import C10D, TORCH, ago, elsewhere, facts, frame, history, in_collective, op, rank, thread

from probing.diagnosis.facts import Condition, Frame, Rank
from probing.diagnosis.stack_calls import StackCall, native_wait, python_wait
from probing.diagnosis.waits import Wait, wait_of

GLOO = (
    "pthread_cond_wait",
    "gloo::transport::tcp::UnboundBuffer::waitRecv(int*, std::chrono::duration)",
    "gloo::(anonymous namespace)::ring(gloo::AllreduceOptionsImpl const&)",
    "gloo::allreduce(gloo::Opts const&)",
)
WORK = (
    "pthread_cond_wait",
    "std::condition_variable::wait(std::unique_lock<std::mutex>&)",
    "c10d::Work::wait(std::chrono::duration<long>)",
)
DDP = (
    "pthread_cond_wait",
    "std::condition_variable::wait(std::unique_lock<std::mutex>&)",
    "c10d::Reducer::finalize_backward()",
    "std::_Function_handler<void (), c10d::Reducer::mark_variable_ready(unsigned long)::{lambda()#1}>::_M_invoke(x)",
    "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
)
FUTURE = ("std::condition_variable::wait(std::unique_lock<std::mutex>&)", "c10::ivalue::Future::wait()")
PYTHON_FUTURE = ("pthread_cond_wait", "torch::jit::PythonFutureWrapper::wait()", "PyObject_Vectorcall")
JAX = (
    "absl::lts_20260107::synchronization_internal::FutexWaiter::Wait(x)",
    "jax::BlockUntilReadyWithCancel(tsl::Future<void>&)",
    "jax::AwaitBuffersReady(absl::lts_20260107::Span<xla::ifrt::Array* const>)",
)
STORE = ("__libc_recv", "c10d::TCPStore::doWait(c10::ArrayRef<std::string>)", "c10d::TCPStore::get(std::string const&)")
SYNC = ("sched_yield", "cudaStreamSynchronize", "at::native::_local_scalar_dense_cuda(at::Tensor const&)")
SLEEP = ("clock_nanosleep", "time_sleep")
BACKWARD = frame(f"_engine_run_backward {TORCH}autograd/graph.py:824")
USER = frame("train train.py:40")


def native(*functions: str) -> tuple[Any, ...]:
    return tuple(Frame(function, native=True) for function in functions)


def wait(one: Rank) -> Wait | None:
    return wait_of(one, facts(one))


@pytest.mark.parametrize(
    ("functions", "call"),
    [
        (GLOO, "gloo::allreduce"),
        (WORK, "c10d::Work::wait"),
        (STORE, "c10d::Store::get"),
        (SYNC, "cudaStreamSynchronize"),
        (("ncclGroupEnd", "x"), "ncclGroupEnd"),
        (SLEEP, None),
        ((), None),
        (("pncclCommInitRank",), "pncclCommInitRank"),
        (DDP, "c10d::Reducer::finalize_backward"),
        (FUTURE, "c10::ivalue::Future::wait"),
        (PYTHON_FUTURE, "torch::jit::PythonFutureWrapper::wait"),
        (JAX, "jax::AwaitBuffersReady"),
    ],
)
def test_native_frames_name_the_call(functions: tuple[str, ...], call: str | None) -> None:
    assert native_wait((*native(*functions), USER)) == call


def test_python_frames_show_operation_and_data() -> None:
    values = {"tensor": "tensor(shape=[3, 4], dtype=float32, device=cpu)", "group": "None"}
    found = python_wait([frame(f"all_reduce {C10D}:3252", **values), USER])
    assert found == StackCall("collective", "all_reduce", None, None, "float32", 12)


@pytest.mark.parametrize(("shape", "count"), [("3, 4", 12), ("", 1), ("0", 0), ("1 2", 2), (" , ", 1), ("5,", 5)])
def test_any_text_of_a_shape_is_read(shape: str, count: int) -> None:
    found = python_wait([frame(f"all_reduce {C10D}:3252", tensor=f"tensor(shape=[{shape}], dtype=float32)"), USER])
    assert found is not None
    assert found.count == count


@pytest.mark.parametrize(
    ("text", "kind", "op_name"),
    [
        (f"barrier {C10D}:1", "collective", "barrier"),
        (f"all_gather_into_tensor {C10D}:1", "collective", "all_gather"),
        (f"recv {C10D}:1", "p2p", "recv"),
        (f"wait_tensor {TORCH}distributed/_functional_collectives.py:1", "collective", None),
        (f"_store_based_barrier {C10D}:1", "init", "store_based_barrier"),
    ],
)
def test_functions_of_torch_that_wait(text: str, kind: str, op_name: str | None) -> None:
    found = python_wait([frame(text), USER])
    assert found is not None
    assert (found.kind, found.op) == (kind, op_name)


@pytest.mark.parametrize("text", ["all_reduce mine.py:3", f"_tensor_to_object {C10D}:3", f"get_rank {C10D}:3"])
def test_other_functions_do_not_wait(text: str) -> None:
    assert python_wait([frame(text), USER]) is None


def test_a_frame_within_the_call_is_where_the_rank_is() -> None:
    assert python_wait([frame("loads pickle.py:3"), frame(f"all_gather_object {C10D}:1"), USER]) is None


def test_the_peer_is_read_from_the_frame() -> None:
    found = python_wait([frame(f"send {C10D}:1", dst="3", group_dst="1"), USER])
    assert found is not None
    assert found.peer == 3


def test_the_wait_is_the_oldest_operation_without_stacks() -> None:
    found = wait(rank(0, op(8, ago=5), op(7, ago=39)))
    assert found is not None
    assert (found.seq, found.since_ns, found.witnesses, found.firm) == (7, ago(39), ("probe",), True)


def test_the_stack_chooses_among_open_operations() -> None:
    ops = [op(7, ago=50, async_op=True, comm="dp"), op(3, "barrier", ago=39)]
    found = wait(rank(0, *ops, stack=in_collective("barrier")))
    assert found is not None
    assert (found.comm, found.op, found.witnesses) == ("0", "barrier", ("probe", "stack"))


def test_a_call_that_waits_goes_before_one_that_does_not() -> None:
    ops = [op(7, ago=50, async_op=True, comm="dp"), op(3, ago=39)]
    found = wait(rank(0, *ops, stack=in_collective()))
    assert found is not None
    assert found.comm == "0"


def test_a_stack_elsewhere_contradicts() -> None:
    assert wait(rank(0, op(7, ago=39), stack=elsewhere())) is None
    assert wait(rank(0, op(7, ago=39, async_op=True), stack=thread(*native(*SLEEP), USER))) is None


def test_a_system_call_of_another_kind_contradicts() -> None:
    asleep = Condition(syscall="clock_nanosleep")
    assert wait(rank(0, op(7, ago=39, async_op=True), stack=elsewhere(), condition=asleep)) is None


def test_an_asynchronous_operation_may_be_awaited_on_any_line() -> None:
    found = wait(rank(0, op(7, ago=39, async_op=True), stack=elsewhere()))
    assert found is not None
    assert not found.firm


@pytest.mark.parametrize("functions", [WORK, SYNC, DDP, FUTURE, PYTHON_FUTURE, JAX])
def test_native_frames_show_a_wait_for_an_asynchronous_operation(functions: tuple[str, ...]) -> None:
    found = wait(rank(0, op(7, ago=39, async_op=True), stack=thread(*native(*functions), BACKWARD, USER)))
    assert found is not None
    assert (found.seq, found.firm or found.witnesses) == (7, True)
    assert found.witnesses == ("probe", "stack")


def test_a_wait_for_the_own_gpu_is_no_wait_for_ranks() -> None:
    assert wait(rank(0, stack=thread(*native(*SYNC), USER))) is None
    assert wait(rank(0, stack=thread(*native(*FUTURE), USER))) is None
    assert wait(rank(0, stack=thread(*native(*JAX), USER))) is None


def test_a_thread_of_autograd_waits_for_the_main_one() -> None:
    engine = thread(
        f"all_gather_into_tensor {C10D}:1",
        f"_pre_backward {TORCH}fsdp.py:3",
        main=False,
        name="pt_autograd_0",
        since_ns=ago(30),
    )
    found = wait(rank(0, threads=(thread(BACKWARD, USER), engine)))
    assert found is not None
    assert (found.op, found.since_ns) == ("all_gather", ago(30))


def test_a_thread_of_autograd_that_waits_for_buckets_needs_no_python_frame() -> None:
    engine = thread(*native(*DDP), main=False, name="pt_autograd_0")
    main = thread(*native("pthread_cond_wait", "torch::autograd::ReadyQueue::pop()"), BACKWARD, USER)
    found = wait(rank(0, op(7, ago=39, async_op=True), threads=(main, engine)))
    assert found is not None
    assert (found.seq, found.witnesses) == (7, ("probe", "stack"))
    computing = thread(*native("cudaLaunchKernel"), main=False, name="pt_autograd_0")
    assert wait(rank(0, op(7, ago=39, async_op=True), threads=(main, computing))) is None


def test_a_thread_beside_a_busy_main_thread_is_not_the_rank() -> None:
    beside = thread(f"barrier {C10D}:1", main=False)
    assert wait(rank(0, threads=(elsewhere(), beside))) is None


def test_threads_of_gloo_show_no_wait_of_the_rank() -> None:
    loop = thread(*native(*GLOO), main=False, name="pt_gloo_runloop")
    assert wait(rank(0, threads=(elsewhere(), loop))) is None


def test_a_wait_in_a_store_is_one_for_the_others() -> None:
    found = wait(rank(0, stack=thread(*native(*STORE), frame("init_process_group x.py:1"), since_ns=ago(3))))
    assert found == Wait(None, None, "init", ago(3), None, ("stack",))


def test_a_sleeping_thread_says_since_when() -> None:
    asleep = Condition(asleep_since_ns=ago(25))
    found = wait(rank(0, stack=in_collective(since_ns=ago(90)), condition=asleep))
    assert found is not None
    assert (found.since_ns, found.witnesses) == (ago(25), ("stack",))


def test_who_polls_a_store_wakes_up_now_and_then() -> None:
    stack = in_collective("_store_based_barrier", since_ns=ago(30))
    found = wait(rank(0, stack=stack, condition=Condition(asleep_since_ns=ago(2))))
    assert found is not None
    assert (found.op, found.since_ns) == ("init", ago(30))


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "stopped"},
        {"condition": Condition(state="T")},
        {"state": "exited"},
        {"condition": Condition(frozen=True)},
    ],
)
def test_a_process_that_does_not_run_waits_for_nobody(fields: dict[str, Any]) -> None:
    assert wait(rank(0, op(7, ago=39), stack=in_collective(), **fields)) is None


def test_an_operation_that_later_ones_have_passed_has_ended() -> None:
    assert wait(rank(0, *history(30, ago=2, every=0.1), op(10, ago=50, async_op=True))) is None
