"""Fixtures of all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import costs
import pytest
import waiting
from long import LONG

# Whoever runs the tests in the background of a script has Ctrl-C ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With its support of forks, gRPC starts a thread in a process that a test forks to start a program as another user. The
# thread ends the process if its descriptors are closed before the exec (github.com/grpc/grpc/issues/43055).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def pytest_configure() -> None:
    costs.count_processes()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked ``long`` to `make test-all`."""
    left_out = [] if LONG else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    costs.begin_test()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    with costs.spent(f"fixture {fixturedef.argname}"):
        return (yield)


@pytest.fixture
def until() -> Callable[..., object]:
    """``waiting.until``: waits for a condition and returns its value."""
    return waiting.until


@pytest.fixture
def open_tmp_path() -> Iterator[Path]:
    """A fresh directory that every user may pass, because the daemon's processes have users of their own."""
    path = Path(tempfile.mkdtemp(prefix="probingd-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# What needs the kernel, root or several processes; tests/unit may skip.
NOT_TO_SKIP = ("e2e", "integration", "kernel")


def _no_skip(report: pytest.TestReport | pytest.CollectReport, item: pytest.Item | pytest.Collector) -> None:
    if report.outcome != "skipped" or os.environ.get("CI") != "true" or hasattr(report, "wasxfail"):
        return
    if not set(NOT_TO_SKIP).isdisjoint(item.path.relative_to(item.config.rootpath).parts):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that needs the kernel or root may not be left out. The last report of a test has its costs."""
    report = yield
    _no_skip(report, item)
    if report.when == "teardown":
        report.user_properties.extend(costs.properties())
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _no_skip(report, collector)
    return report
