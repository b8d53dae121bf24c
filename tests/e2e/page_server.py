"""The page of ``probingctl web`` before a real daemon, as a process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from browser import Tab, opened
from e2e_support import BIN, Daemon, end_process, start_process
from playwright.sync_api import Browser

__all__ = ("Address", "page_of", "page_server")


class Address(NamedTuple):
    """Where the page is: its ``origin``, and the ``entry`` with the key, for the first visit of a browser."""

    origin: str
    entry: str


@contextmanager
def page_server(daemon: Daemon, *options: str) -> Iterator[Address]:
    """Starts the page before ``daemon``, with ``options`` of probingctl."""
    words = (BIN / "probingctl", "-t", daemon.target, *options, "web", "--port", "0", "--no-browser")
    server = start_process(*words, stdout=subprocess.PIPE, text=True, env={"PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        address = re.search(r"(http://127\.0\.0\.1:\d+)(/\?key=\S+)", server.stdout.readline())
        assert address is not None
        yield Address(address[1], address[2])
    finally:
        end_process(server)


@contextmanager
def page_of(daemon: Daemon, browser: Browser, *options: str) -> Iterator[Tab]:
    """Starts the page before ``daemon``, with ``options`` of probingctl, and opens it."""
    with page_server(daemon, *options) as address, opened(browser, address.origin) as tab:
        tab.go(address.entry)
        yield tab
        assert tab.complaints == []
        assert tab.strange == []
