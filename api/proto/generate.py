"""Generates the Python code of the protocols beside their .proto files: ``python api/proto/generate.py``.

``probing/v1`` is our own protocol. ``arrow/flight`` has unchanged files of Apache Arrow.
"""

from __future__ import annotations

import re
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PROTOS = sorted(p for folder in ("arrow/flight", "probing/v1") for p in ROOT.glob(f"{folder}/*.proto"))


def main() -> None:
    _run(PROTOS, "python", "pyi")
    _run([p for p in PROTOS if re.search(r"^service ", p.read_text(), re.M)], "grpc_python")
    # The generated code imports modules by the path of the .proto file (``from probing.v1 import``), but the modules
    # are in the package probing.api.proto.
    for path in ROOT.glob("*/*/*_pb2*.py"):
        old, new = r"^from (arrow\.flight|probing\.v1) import", r"from probing.api.proto.\1 import"
        path.write_text(re.sub(old, new, path.read_text(), flags=re.M))


def _run(protos: list[Path], *kinds: str) -> None:
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={ROOT}" for kind in kinds]
    names = [str(p.relative_to(ROOT)) for p in protos]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *names]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    main()
