"""Generates the Python code of the protocol beside its .proto files: ``python api/proto/generate.py``."""

from __future__ import annotations

import re
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PROTOS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("probing/v1/*.proto"))


def main() -> None:
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *PROTOS]) != 0:
        raise SystemExit("protoc failed")
    # protoc names modules after the .proto's folder; ours lie in the package probing.api.proto.
    for path in ROOT.glob("probing/v1/*_pb2*.py"):
        text = re.sub(
            r"^from probing\.v1 import", "from probing.api.proto.probing.v1 import", path.read_text(), flags=re.M
        )
        path.write_text(text)


if __name__ == "__main__":
    main()
