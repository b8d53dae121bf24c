"""The input line of the shell: editing, history and completion by prompt_toolkit."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, completion_is_selected
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from probing.api.errors import ProbingError
from probing.api.tables import TABLES
from probing.api.text import escape
from probing.client.cluster import Cluster
from probing.client.settings import Settings
from probing.client.shell.words import candidates, is_whole
from probing.client.wire.credentials import Tls

__all__ = ("Prompt", "PythonPrompt", "history_path", "trim_history")

_COLUMNS = "SELECT table_schema, table_name, column_name, type FROM probing.column_docs"
_NAME = re.compile(r"[A-Za-z_]\w{0,62}")
_MAX_HISTORY = 1 << 18
_MAX_BYTES = 16 << 20
_MAX_SHOWN = 200


class Prompt:
    """Reads one input at a time."""

    def __init__(self, settings: Settings, everywhere: Callable[[], bool]) -> None:
        """Makes the prompt. ``everywhere`` returns whether all nodes are asked, which the prompt shows."""
        self._everywhere = everywhere
        self._session = _session("history", _Completer(settings), is_whole, "...> ")

    def ask(self, unfinished: str = "") -> str:
        """Returns the user's input, which begins with ``unfinished``. Raises KeyboardInterrupt (Ctrl-C), EOFError
        (Ctrl-D).
        """
        default = f"{unfinished}\n" if unfinished else ""
        return self._session.prompt("all> " if self._everywhere() else "sql> ", default=default)


class PythonPrompt:
    """Reads one Python input at a time. ``names`` returns completions of the text before the cursor: pairs of a text
    and the number of characters that it replaces. ``is_whole`` returns whether an input can be run.
    """

    def __init__(self, names: Callable[[str], list[tuple[str, int]]], is_whole: Callable[[str], bool]) -> None:
        self._session = _session("python_history", _Names(names), is_whole, "... ")

    def ask(self) -> str:
        """Returns the user's input. Raises KeyboardInterrupt (Ctrl-C), EOFError (Ctrl-D)."""
        return self._session.prompt(">>> ")


class _Names(Completer):
    def __init__(self, names: Callable[[str], list[tuple[str, int]]]) -> None:
        self._names = names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        for name, replaced in self._names(document.text_before_cursor):
            yield Completion(name, start_position=-replaced)


def _session(
    history: str, completer: Completer, is_whole: Callable[[str], bool], continuation: str
) -> PromptSession[str]:
    return PromptSession(
        history=_history(history),
        completer=completer,
        complete_while_typing=False,
        complete_in_thread=True,
        enable_history_search=False,
        multiline=True,
        key_bindings=_keys(is_whole),
        prompt_continuation=lambda width, _number, _wrapped: continuation.rjust(width),
    )


def _keys(is_whole: Callable[[str], bool]) -> KeyBindings:
    keys = KeyBindings()

    @Condition
    def whole() -> bool:
        return is_whole(get_app().current_buffer.text)

    @keys.add("enter", filter=whole & ~completion_is_selected)
    def _accept(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    return keys


class _Completer(Completer):
    """Completes SQL with the tables of probing.api, and once the node has answered also with the node's tables."""

    def __init__(self, settings: Settings) -> None:
        self._tables = {name: {f.name: str(f.type) for f in table.logical} for name, table in TABLES.items()}
        threading.Thread(target=self._learn, args=(settings,), name="tables", daemon=True).start()

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:  # noqa: ARG002
        found = candidates(document.text_before_cursor, document.text, lambda: self._tables)
        for text, replaced, meaning in islice(found, _MAX_SHOWN):
            yield Completion(text, start_position=-replaced, display_meta=meaning)

    def _learn(self, settings: Settings) -> None:
        # Without an answer, only the tables of probing.api are completed.
        tls = Tls(*settings.tls) if settings.tls is not None else None
        node = Cluster(settings.target, token=settings.token, tls=tls, timeout=settings.timeout, max_bytes=_MAX_BYTES)
        with suppress(ProbingError), node:
            columns_of_all = node.query(_COLUMNS)
            tables = {name: dict(columns) for name, columns in self._tables.items()}
            for schema, table, column, kind in zip(*(c.to_pylist() for c in columns_of_all.columns), strict=True):
                # A node is not trusted, so only valid names are shown.
                if all(_NAME.fullmatch(str(part)) for part in (schema, table, column)):
                    tables.setdefault(f"{schema}.{table}", {})[column] = escape(str(kind))[:40]
            self._tables = tables


def history_path(name: str = "history") -> Path:
    """Returns the path of the history ``name``: under XDG_STATE_HOME, by default ``~/.local/state``."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    root = given if given.is_absolute() else Path.home() / ".local" / "state"
    return root / "probingctl" / name


def _history(name: str) -> History:
    path = history_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        trim_history(path)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))


def trim_history(path: Path, most: int = _MAX_HISTORY) -> None:
    """Creates the file ``path``, readable only by its owner. If the file has more than ``most`` bytes, keeps only the
    entries in its last ``most`` / 2 bytes.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "r+b") as file:
        os.fchmod(file.fileno(), 0o600)
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            return
        file.seek(size - most // 2)
        # The first entry that is left may be incomplete, so it is dropped.
        _, _, kept = file.read(most // 2).partition(b"\n\n")
        file.seek(0)
        file.write(b"\n" + kept)
        file.truncate()
