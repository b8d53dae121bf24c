"""What tests on the live kernel share: objects, a bpffs folder of their own, and a target that makes counted calls.

These tests need root and BPF, and fail where they have none: a skipped kernel test would prove nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counted_calls import TARGET, Target
from long import long_unless
from xdist.scheduler import LoadScopeScheduling

from probing.daemon.bpf import pins
from probing.daemon.bpf.build import build, compile_object
from probing.daemon.bpf.session import Session

# Tests of these modules put probes into torch's library, and see the calls of each other's jobs.
_OF_TORCH = ("test_gloo_operations", "test_steps_of_jobs", "test_optimizer_calls")


class _ByLibrary(LoadScopeScheduling):  # type: ignore[misc]
    """Runs the tests of a module in one process, and all that probe torch in one."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "torch" if Path(module).stem in _OF_TORCH else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByLibrary:
    return _ByLibrary(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the tests that probe torch: no others take as long one after the other."""
    items.sort(key=lambda item: item.path.stem not in _OF_TORCH)


PROBE = r"""
#include "guard.bpf.h"
#include "loss.bpf.h"
#include "process.bpf.h"
#include "regs.bpf.h"

struct call_record {
	__u64 number, fifth, sixth, seventh, eighth;
	__u64 cookie, start_ns;
	__u32 tgid, tid;
};

RING(calls, struct call_record, 1 << 16);

UPROBE(on_call)
{
	struct call_record record = {};

	record.number = argument(ctx, 0);
	record.fifth = argument(ctx, 4);
	record.sixth = argument(ctx, 5);
	record.seventh = argument(ctx, 6);
	record.eighth = argument(ctx, 7);
	record.cookie = probe->cookie;
	record.start_ns = current_start_ns();
	record.tgid = current_tgid();
	record.tid = current_tid();
	RING_PUSH(calls, &record);
}

SEC("raw_tp")
int add(struct bpf_raw_tracepoint_args *ctx)
{
	return ctx->args[0] + ctx->args[1];
}

char LICENSE[] SEC("license") = "GPL";
"""


@pytest.fixture(scope="session", autouse=True)
def built_objects() -> list[Path]:
    return build()


@pytest.fixture(scope="session")
def probe_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    source = folder / "probe.bpf.c"
    source.write_text(PROBE)
    return compile_object(source)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    source = folder / "target.c"
    source.write_text(TARGET)
    subprocess.run(["cc", "-O1", "-o", folder / "target", source], check=True)
    return folder / "target"


@pytest.fixture
def target(target_path: Path) -> Iterator[Target]:
    target = Target(target_path)
    yield target
    target.close()


_numbers = itertools.count()


@pytest.fixture
def pin_root() -> Iterator[Path]:
    """A bpffs folder of this test alone; left-over pins are removed."""
    root = Path(f"/sys/fs/bpf/probingd-test-{os.getpid()}-{next(_numbers)}")
    yield root
    pins.cleanup(pin_root=root)
    if root.exists():
        root.rmdir()


@pytest.fixture(params=["uprobe_multi", long_unless(False, "fallback")])
def fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether uprobes are attached by perf events, whatever the environment asks for.

    The gate tries both ways where a test is marked ``both_ways``, and uprobe_multi elsewhere.
    """
    monkeypatch.delenv("PROBINGD_WITHOUT", raising=False)
    return bool(request.param == "fallback")


@pytest.fixture
def open_session(pin_root: Path, fallback: bool) -> Iterator[Callable[..., Session]]:
    """Session.open on the test's folder and kind of link; sessions that are still open at the end are closed."""
    opened: list[Session] = []

    def make(*objects: str | Path, instance: str = "test", **options: object) -> Session:
        session = Session.open(instance, list(objects), pin_root, fallback, **options)  # type: ignore[arg-type]
        opened.append(session)
        return session

    yield make
    for session in opened:
        session.close(keep=True)
