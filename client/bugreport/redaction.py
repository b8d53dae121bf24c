"""Replaces names in a bug report by tokens. A name has the same token in all parts, so that the parts can be compared.

Values are shown by allow-list: the ``Kind`` of a column says which part of its values may be shown, and a column
without a kind is not asked for.

Free text, such as a line of a log or the reason of a loss, may contain any name. Therefore only the words of the
``vocabulary`` are shown: words that occur in the published sources of this package or in ``_MESSAGES``. All other words
become tokens, so names of jobs, hosts and users need not be recognized.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = (
    "Kind",
    "Redactor",
    "separated",
    "vocabulary",
)

_PACKAGES = ("api", "client", "daemon", "diagnosis", "federation")
_SUFFIXES = (".py", ".c", ".h", ".proto")
_IDENTIFIER = re.compile(r"[a-z_]\w*")
# Separators of words, in sources and in texts. The characters of ``_ENDS`` are stripped from both ends of a word before
# the word is looked up.
_SEPARATOR = re.compile(r"([\s\"'`(){}\[\]<>;|,\\]+)")
_ENDS = ".:!?=*-…"
# Words that occur in messages of systemd, the kernel, libbpf and Python.
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


class _Vocabulary:
    """The words that may be shown. ``words``: in lower case. ``files``: our own source files, such as
    ``daemon/store/store.py``.
    """

    def __init__(self, words: frozenset[str], files: frozenset[str]) -> None:
        self._words = words
        self._files = files

    def __contains__(self, word: str) -> bool:
        """Returns whether the whole ``word`` is in the vocabulary."""
        return word.lower() in self._words

    def own_file(self, path: str) -> str | None:
        """Returns ``path`` without the installation directory if it is one of our source files; else None."""
        parts = path.split("/")
        ends = ("/".join(parts[n:]) for n in range(max(len(parts) - 8, 0), len(parts) - 1))
        return next((end for end in ends if end in self._files), None)


def separated(text: str) -> list[tuple[str, str, str, str]]:
    """Returns the words of ``text``, each with the punctuation before and after it and the separator that follows. All
    parts joined are ``text`` again."""
    pieces = _SEPARATOR.split(text)
    found = []
    for word, separator in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        bare = word.strip(_ENDS)
        before, _, behind = word.partition(bare) if bare else (word, "", "")
        found.append((before, bare, behind, separator))
    return found


@lru_cache(maxsize=1)
def vocabulary() -> _Vocabulary:
    """Returns the vocabulary of the packages installed here. Without the daemon's package fewer words are shown."""
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
    return _Vocabulary(frozenset(words), frozenset(files))


_NUMBER = re.compile(
    r"[+-]?\d{1,20}([.,]\d{1,12})?(e[+-]?\d{1,3})?(%|[kKMGT]?i?B|[numμ]?s|m|h|d|k|M|x)?"
    r"|\d{1,6}\.\d{1,6}\.\d{1,6}|\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,9})?)?)?Z?|\d\d:\d\d(:\d\d(\.\d{1,9})?)?Z?"
)
_VERSION = re.compile(r"v?\d{1,6}(\.\d{1,6}){1,3}([.+-]?(rc|a|b|dev|post|cu|cuda)[\d.]{1,8})?")
# While a text is split, a name of several words is replaced by a number between two of these characters. If the text
# itself contains the character, it is first replaced by ``?``.
_MARK = "\ue000"
_MARKED = re.compile(f"{_MARK}(\\d+){_MARK}")
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}(/\d{1,2})?(:\d{1,5})?")
_UNIT = re.compile(r"probingd(?:-([a-z]{1,20}))?@?(?:\.(?:service|socket|target|slice))?")
_JOINED = re.compile(r"([=:,+@])")
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MAX_TEXT = 4096
# A name that consists of digits is replaced in texts if it has at least this many; a shorter number may be a count.
_MIN_DIGITS = 3


class Kind(Enum):
    """The kinds of values; each kind says what a report may show of a value."""

    NUMBER = "numbers, times, true and false"
    VERSION = "the number of a version"
    PLAIN = "what the daemon says of itself"
    TEXT = "words of the vocabulary"
    TEXTS = "a list of texts"
    JOB = "job"
    RUN = "run"
    HOST = "host"
    HOSTS = "a list of hosts"
    USER = "user"
    PATH = "path"
    ADDRESS = "address"
    CONTAINER = "container"
    POD = "pod"
    FINDING = "finding"


class Redactor:
    """Replaces names in texts. A name is recognized in texts only after ``token`` was called for it, so call ``token``
    for all names first. Not thread-safe.
    """

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()
        self._in_texts: dict[str, str] = {}
        # Names of several words, which a search by word does not find.
        self._long: list[str] = []
        self._sorted = True
        # Values that the daemon reports about itself, such as the version of the kernel. Texts show these values too.
        self._plain: set[str] = set()

    @property
    def names(self) -> Mapping[str, str]:
        """Returns the name behind each token."""
        return {token: name for (_, name), token in self._tokens.items()}

    @property
    def counts(self) -> Mapping[str, int]:
        """Returns the number of different names of each kind that were replaced."""
        return dict(self._numbers)

    def value(self, kind: Kind, value: Any) -> Any:
        """Returns what the report may show of ``value``, which is of the kind ``kind``."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if kind is Kind.TEXTS:
            return self._texts(str(value))
        text = str(value)[:_MAX_TEXT]
        if kind is Kind.PLAIN and text.isprintable():
            self._plain.add(text)
            return text
        if kind is Kind.VERSION and _VERSION.fullmatch(text):
            return text
        if kind in (Kind.NUMBER, Kind.VERSION, Kind.PLAIN, Kind.TEXT):
            return self.text(text)
        if kind is Kind.HOSTS:
            return ",".join(self.token(Kind.HOST, name) for name in text.split(",") if name)
        return self.token(kind, text) if text else text

    def token(self, kind: Kind, name: str) -> str:
        """Returns the token of ``name``. In texts, the token of a host also replaces the part before the first dot."""
        token = self._token(kind.value, name)
        if kind is Kind.HOST and not _IPV4.fullmatch(name):
            self._meet(name.partition(".")[0], token)
        return token

    def _texts(self, value: str) -> list[str] | str:
        """Returns the redacted texts of a JSON list."""
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        return [self.text(str(one)) for one in found] if isinstance(found, list) else self.text(value)

    def text(self, text: str) -> str:
        """Returns ``text`` with tokens in place of names that have a token and of words outside of the vocabulary."""
        if not self._sorted:
            # Longer names are replaced first, because a name may be a part of another name.
            self._long.sort(key=len, reverse=True)
            self._sorted = True
        text = text.replace(_MARK, "?")
        for number, name in enumerate(self._long):
            text = text.replace(name, f"{_MARK}{number}{_MARK}")
        found = separated(text[:_MAX_TEXT])
        return "".join(f"{before}{self._word(bare)}{behind}{separator}" for before, bare, behind, separator in found)

    def _token(self, kind: str, name: str) -> str:
        token = self._tokens.get((kind, name))
        if token is None:
            self._numbers[kind] += 1
            token = self._tokens[kind, name] = f"{kind}-{self._numbers[kind]}"
            self._meet(name, token)
        return token

    def _meet(self, name: str, token: str) -> None:
        if name in self._in_texts or not name or (name.isdigit() and len(name) < _MIN_DIGITS):
            return
        self._in_texts[name] = token
        if separated(name)[0][1] != name:
            self._long.append(name)
            self._sorted = False

    def _word(self, word: str) -> str:
        if not word:
            return word
        if marked := _MARKED.fullmatch(word):
            return self._in_texts[self._long[int(marked[1])]]
        if _MARK in word:
            # The word contains a name of several words and other characters, so the whole word becomes one token.
            return self._token("name", _MARKED.sub(lambda found: self._long[int(found[1])], word))
        if (token := self._in_texts.get(word)) is not None:
            return token
        if word in self._plain or word in self._vocabulary or _NUMBER.fullmatch(word) or self._is_unit(word):
            return word
        if _IPV4.fullmatch(word) or word.count(":") > 2 or "://" in word:
            return self._token("address", word)
        parts = _JOINED.split(word)
        if len(parts) > 1 and "/" not in parts[0]:
            return "".join(part if n % 2 else self._word(part) for n, part in enumerate(parts))
        return self._path(word) if "/" in word else self._token("name", word)

    def _is_unit(self, word: str) -> bool:
        """Returns whether ``word`` is the name of one of our systemd units."""
        unit = _UNIT.fullmatch(word)
        return unit is not None and (unit[1] is None or unit[1] in self._vocabulary)

    def _path(self, path: str) -> str:
        if (own := self._vocabulary.own_file(path)) is not None:
            return f"probing/{own}"
        if (place := path.rpartition(":"))[2].isdigit():
            return f"{self._word(place[0])}:{place[2]}"
        parts = path.split("/")
        # For example /proc/PID/maps and status=9/KILL.
        known = all(not part or part.isdigit() or part in self._vocabulary for part in parts)
        if known and (path.startswith(_SYSTEM) or parts[0].isdigit()):
            return path
        # The name of a library or of one of our files is useful; its directory is not.
        named = "." in parts[-1] and parts[-1] in self._vocabulary
        token = self._token("path", path)
        return f"{token}/{parts[-1]}" if named else token
