"""Compiles each ``NAME.bpf.c`` of a folder to objects beside it; ``python -m probing.daemon.bpf.build [FOLDER]``.

``NAME.bpf.o`` loads everywhere. The programs of ``NAME.preempt.bpf.o`` disable preemption, on kernels that allow this.
The objects contain no layouts of kernel structs (CO-RE), so one build with the package loads on Linux 5.10 and later.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from probing.api.errors import ConfigError, ProbingError

__all__ = ("build", "compile_object", "main")

FOLDER = Path(__file__).resolve().parent
# Linux 5.10 accepts instruction sets up to v2. v3 has atomics that need 5.12, so only optional objects use v3.
_FLAGS = ("-O2", "-g", "-target", "bpf", "-Wall", "-Werror")
_CPU = {"python_off": "v3"}


def build(folder: Path = FOLDER) -> list[Path]:
    """Compiles the sources that are newer than their objects. Returns all objects of ``folder``. Raises ConfigError."""
    headers = [*FOLDER.glob("*.bpf.h"), *folder.glob("*.bpf.h")]
    newest_header = max((header.stat().st_mtime_ns for header in headers), default=0)
    objects = []
    for source in sorted(folder.glob("*.bpf.c")):
        newest = max(newest_header, source.stat().st_mtime_ns)
        for target, flags in _variants(source):
            if not target.exists() or target.stat().st_mtime_ns <= newest:
                _compile(source, target, flags)
            objects.append(target)
    return objects


def compile_object(source: Path) -> Path:
    """Compiles one source, and returns the object that loads everywhere. Raises ConfigError."""
    for target, flags in _variants(source):
        _compile(source, target, flags)
    return source.with_suffix(".o")


def _variants(source: Path) -> list[tuple[Path, list[str]]]:
    name = source.name.removesuffix(".bpf.c")
    return [
        (source.with_name(f"{name}.bpf.o"), []),
        (source.with_name(f"{name}.preempt.bpf.o"), ["-DPROBING_PREEMPT"]),
    ]


def _compile(source: Path, target: Path, flags: list[str]) -> None:
    """Compiles ``source`` to ``target``, which is written whole or not at all. Raises ConfigError with the compiler's
    message.
    """
    clang = _tool("clang")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        # With -ffile-prefix-map the object, and so the layout, does not depend on the folder of the sources.
        cpu = _CPU.get(source.name.removesuffix(".bpf.c"), "v2")
        command = [clang, *_FLAGS, f"-mcpu={cpu}", *flags, f"-ffile-prefix-map={source.parent}=.", *_includes(source)]
        _run([*command, "-c", str(source), "-o", str(partial)])
        if strip := shutil.which("llvm-strip"):
            _run([strip, "-g", str(partial)])
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _includes(source: Path) -> list[str]:
    # With -target bpf, clang does not look into the multiarch folder, where Debian keeps asm/types.h.
    multiarch = [str(path.parent) for path in Path("/usr/include").glob("*-linux-gnu/asm")]
    return [f"-I{FOLDER}", f"-I{source.parent}", *(f"-I{path}" for path in multiarch)]


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        hint = f"install {name} and libbpf's headers, or use a built package"
        raise ConfigError(f"{name} is not installed", hint=hint)
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise ConfigError(f"{Path(command[0]).name} failed: {first}", hint="install clang and libbpf-dev")


def main() -> int:
    try:
        for path in build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER):
            print(path)
    except ProbingError as e:
        print(f"error: {e.message}\nhint: {e.hint}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
