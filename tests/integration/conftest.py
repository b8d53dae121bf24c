"""Fixtures of several files: a service, and pools whose readers and parsers are real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes_helpers import Listener, listening
from service_helpers import Service, serving

from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool


@pytest.fixture
def service(open_tmp_path: Path) -> Iterator[Service]:
    with serving(open_tmp_path) as made:
        yield made


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    """Starts readers."""
    with listening(tmp_path / "reader.sock", "probing.daemon.confined.reader") as made:
        yield made


@pytest.fixture
def parser_listener(tmp_path: Path) -> Iterator[Listener]:
    """Starts the parsers of ``parser_pool``."""
    with listening(tmp_path / "parser.sock", "probing.daemon.confined.parser") as made:
        yield made


@pytest.fixture
def parser_pool(parser_listener: Listener) -> Iterator[ParserPool]:
    made = ParserPool(parser_listener.path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReaderPool]:
    with listening(tmp_path_factory.mktemp("r") / "reader.sock", "probing.daemon.confined.reader") as listener:
        pool = ReaderPool(listener.path, 1)
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParserPool]:
    with listening(tmp_path_factory.mktemp("p") / "parser.sock", "probing.daemon.confined.parser") as listener:
        pool = ParserPool(listener.path)
        yield pool
        pool.close()
