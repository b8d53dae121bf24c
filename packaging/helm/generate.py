"""Writes what follows from the chart and the daemon: keys of the configuration in its schema, and the plain DaemonSet.

``make kubernetes`` runs it; a test checks that both are up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python

from probing.daemon.config import Option, options

__all__ = ("CHART", "MANIFEST", "SCHEMA", "manifest", "schema")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "packaging" / "helm" / "probingd"
SCHEMA = CHART / "values.schema.json"
MANIFEST = ROOT / "packaging" / "kubernetes" / "probingd.yaml"
# Other values of the chart decide about these.
CHARTS_OWN = frozenset(
    (
        "node_name",
        "state_dir",
        "socket",
        "runtime_dir",
        "listen",
        "flight",
        "http",
        "token_file",
        "insecure",
        "cluster.seeds",
        "cluster.advertise",
        "probes.bpffs",
    )
)
SECTIONS_OF_CHART = ("tls", "users")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
HEADER = """\
# probingd on each node of a cluster: `kubectl apply -f packaging/kubernetes`. docs/kubernetes.md explains it.
# Made from packaging/helm/probingd with its default values by `make kubernetes`; change those.
"""


def schema() -> str:
    """Returns the schema of the values as text, with the keys of probingd.toml under ``config``."""
    whole = json.loads(SCHEMA.read_text())
    whole["properties"]["config"] = _config()
    return json.dumps(whole, indent=2) + "\n"


def manifest(values: Mapping[str, Any] | None = None, *, release: str = "probingd", namespace: str = "probingd") -> str:
    """Returns the objects that the chart makes of ``values``, as YAML documents. Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values or {}), name=release, namespace=namespace)
    texts = [text.strip() for name, text in sorted(rendered.items()) if name.endswith(".yaml")]
    return "---\n".join(f"{text}\n" for text in texts if text)


def _config() -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, option in options():
        section, _, key = name.rpartition(".")
        if name in CHARTS_OWN or section in SECTIONS_OF_CHART:
            continue
        group = keys.setdefault(section, _object())["properties"] if section else keys
        group[key] = _type(option)
    return {"description": "keys of probingd.toml, in their sections", **_object(), "properties": keys}


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _type(option: Option) -> dict[str, Any]:
    """Returns the schema of one option, as ``Config.load`` checks it."""
    described = {"description": option.doc}
    if isinstance(option.default, tuple):
        return {**described, "type": "array", "items": {"type": "string"}}
    kind = type(option.default)
    found: dict[str, Any] = {**described, "type": TYPES[kind]}
    if kind in (int, float) and option.least is not None:
        found["minimum"] = option.least
    return found


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    MANIFEST.parent.mkdir(exist_ok=True)
    MANIFEST.write_text(HEADER + manifest())
