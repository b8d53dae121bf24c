"""Whether the wheels of the kit need nothing that is missing, and what is installed meets probingd's bounds.

``python -m gpu_kit.wheels FOLDER NAME...`` ends with 1 where a wheel in FOLDER needs something that is neither there
nor among the NAMEs, which the machine brings.
"""

from __future__ import annotations

import email
import importlib.metadata
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

__all__ = ("main", "missing_wheels", "unmet")

# The interpreter of the machine with the GPU.
_PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}


def missing_wheels(folder: Path, brought: Iterable[str]) -> list[str]:
    """Returns what a wheel in ``folder`` needs and neither ``folder`` nor the machine has, with the bounds."""
    versions = {}
    requirements: list[str] = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        versions[str(name)] = str(version)
        requirements += _requirements(wheel)
    found = unmet(requirements, lambda name: versions.get(name))
    known = {canonicalize_name(name) for name in brought}
    return [text for text in found if canonicalize_name(Requirement(text.partition(":")[0]).name) not in known]


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def unmet(requirements: Iterable[str], version: Callable[[str], str | None]) -> list[str]:
    """Returns the requirements that are not met, each with what there is: ``numpy>=2.2: 2.1.0`` or ``duckdb: none``.

    ``version`` returns the version of a package by its canonical name, None where it is missing.
    """
    environment = {**default_environment(), **_PYTHON}
    wanted = {str(found): found for found in map(Requirement, requirements)}
    result = []
    for requirement in wanted.values():
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        found = version(canonicalize_name(requirement.name))
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            result.append(f"{requirement.name}{requirement.specifier}: {found or 'none'}")
    return result


def installed(name: str) -> str | None:
    """Returns the version of an installed package, None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str]) -> int:
    """Prints what is missing in the wheels of a folder; without arguments, what the installed probingd lacks."""
    if argv:
        found = missing_wheels(Path(argv[0]), argv[1:])
    else:
        found = unmet(importlib.metadata.requires("probingd") or [], installed)
    for text in found:
        print(f"unmet: {text}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
