"""``probingctl`` where only a process can be: in a network namespace, as another user.

The process runs all commands of a test, each as cheaply as ``client_in_process`` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from client_in_process import probingctl
from waiting import DEADLINE_S, asking

__all__ = ("ClientElsewhere",)


class ClientElsewhere:
    """Runs commands in a process that ``words`` start, as ``ip netns exec NAME``; the process ends with ``close``."""

    def __init__(self, words: Sequence[str]) -> None:
        command = [*words, sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._one_at_a_time = threading.Lock()

    def probingctl(self, *arguments: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """Runs a command with more variables; returns exit code, stdout and stderr.

        Raises AssertionError if it takes longer than DEADLINE_S.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with asking(), self._one_at_a_time:
            late = threading.Timer(DEADLINE_S, self._process.kill)
            late.start()
            try:
                print(json.dumps((arguments, dict(env))), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
            finally:
                late.cancel()
        assert answer, f"{arguments}: no answer in {DEADLINE_S:g} s, or the process has ended"
        return subprocess.CompletedProcess(list(arguments), *json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    answers = sys.stdout
    for line in sys.stdin:
        arguments, env = json.loads(line)
        os.environ.update(env)
        done = probingctl(*arguments)
        print(json.dumps((done.returncode, done.stdout, done.stderr)), file=answers, flush=True)


if __name__ == "__main__":
    main()
