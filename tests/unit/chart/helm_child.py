"""Helm in a process of its own: its Go runtime starts threads and takes signals, which no other test shall meet.

Reads calls as lines of JSON, ``[function, arguments...]``, and answers with ``{"result": ...}`` or ``{"error": TEXT}``.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ("GENERATE", "Helm", "HelmRefusal")

GENERATE = Path(__file__).resolve().parents[3] / "packaging" / "helm" / "generate.py"


class HelmRefusal(Exception):
    """Helm has refused values, or a template that it could not render."""


class Helm:
    """The process; it ends with ``close``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def manifest(self, values: dict[str, Any], release: str = "probingd", namespace: str = "probingd") -> str:
        return str(self._call("manifest", values, release, namespace))

    def lint(self, values: dict[str, Any]) -> dict[str, Any]:
        return dict(self._call("lint", values))

    def defaults(self) -> dict[str, Any]:
        return dict(self._call("defaults"))

    def schema(self) -> str:
        return str(self._call("schema"))

    def close(self) -> None:
        self._process.communicate()

    def _call(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise HelmRefusal(answer["error"])
        return answer["result"]


def _serve() -> None:
    import helm_python

    made = runpy.run_path(str(GENERATE))

    def defaults() -> dict[str, Any]:
        with helm_python.Chart.load(made["CHART"]) as chart:
            return chart.values

    calls = {
        "manifest": lambda values, release, namespace: made["manifest"](values, release=release, namespace=namespace),
        "lint": lambda values: helm_python.lint(made["CHART"], values, strict=True),
        "schema": made["schema"],
        "defaults": defaults,
    }
    for line in sys.stdin:
        name, *words = json.loads(line)
        try:
            answer = {"result": calls[name](*words)}
        except helm_python.HelmError as e:
            answer = {"error": str(e)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
