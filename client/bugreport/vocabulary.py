"""The words that a report may show as they are: those of our own sources, and of the system's messages.

Free text, such as a line of a log or the reason of a loss, may name anything. A word of it is shown only if it occurs
in the published sources of this package, or among the words below: no name of a job, host or user has to be
recognised.
"""

from __future__ import annotations

import os
import re
import signal
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ("Vocabulary", "separated", "vocabulary")

_PACKAGES = ("api", "client", "daemon", "diagnosis", "federation")
_SUFFIXES = (".py", ".c", ".h", ".proto")
_IDENTIFIER = re.compile(r"[a-z_]\w*")
# Between words, in sources as in texts. Their ends may have punctuation besides.
_SEPARATOR = re.compile(r"([\s\"'`(){}\[\]<>;|,\\]+)")
_ENDS = ".:!?=*-…"
# Of systemd, the kernel, libbpf and Python, as their messages have them.
_MESSAGES = """
aborted activated activating active after already attempt bad because been before begins blocked broken called
cannot cause caused changed child closed code connection consumed control cpu created deactivated deactivating
dead deadline denied dependency device directory disconnected dump dumped during end ended entered entering
error errors exceeded exit exit-code exited expired failed failure fatal file finished for found from full
gone group has have ignored in inactive interrupted invalid is it its job kernel kill killed killing last left
libbpf limit limited listening load loaded loading lost main main-process memory missing more most no not
notify of on only oom oom-kill open opened operation out over overwritten path peak permission pinned pinning
plugin process processed protocol queued reached ready reason received refused reload reloaded reloading
removed repeated request reset resource restart restarted restarting result return running scheduled seconds
segfault sending sent service signal signal-process skipped slice socket start start-limit-hit started
starting state status still stop stopped stopping succeeded success supported swap system systemd target
terminated termination time timed timeout too traceback triggered unable unavailable unexpected unit unknown
unloaded unsupported used valid verifier waiting wall warning was watchdog when while with without wrong
"""


class Vocabulary:
    """``words``: in lower case. ``files``: our own source files, as ``daemon/store/store.py``."""

    def __init__(self, words: frozenset[str], files: frozenset[str]) -> None:
        self._words = words
        self._files = files

    def __contains__(self, word: str) -> bool:
        """Whether ``word``, as a whole, is one of ours."""
        return word.lower() in self._words

    def own_file(self, path: str) -> str | None:
        """Returns the end of ``path`` that is one of our source files, without the place where they are installed."""
        parts = path.split("/")
        ends = ("/".join(parts[n:]) for n in range(max(len(parts) - 8, 0), len(parts) - 1))
        return next((end for end in ends if end in self._files), None)


def separated(text: str) -> list[tuple[str, str, str, str]]:
    """Returns the words of ``text``, each with the punctuation before and behind it, and what separates it from the
    next one; joined they are ``text`` again."""
    pieces = _SEPARATOR.split(text)
    found = []
    for word, separator in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        bare = word.strip(_ENDS)
        before, _, behind = word.partition(bare) if bare else (word, "", "")
        found.append((before, bare, behind, separator))
    return found


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Returns the vocabulary of the packages that are installed here. Without the daemon's it is smaller, and more is
    left out of texts."""
    words = {word.lower() for word in _MESSAGES.split()} | {number.name.lower() for number in signal.Signals}
    texts = [os.strerror(number) for number in range(1, 134)]
    files = set()
    for package in _PACKAGES:
        spec = find_spec(f"probing.{package}")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            root = Path(folder)
            for path in root.rglob("*"):
                if path.suffix in _SUFFIXES and path.is_file():
                    files.add(f"{package}/{path.relative_to(root)}")
                    texts.append(path.read_text(encoding="utf-8", errors="replace"))
    for text in texts:
        lower = text.lower()
        words.update(_IDENTIFIER.findall(lower))
        words.update(word.strip(_ENDS) for word in _SEPARATOR.split(lower))
    return Vocabulary(frozenset(words), frozenset(files))
