"""A source of GPUs over the real process, the real nvidia-ml-py, and the double of the driver's library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.nvml_double import build_nvml
from gpu_helpers import Gpus, gpus


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> Iterator[Callable[..., Gpus]]:
    """Makes a driver with the values given, and the source that reads it."""
    made: list[Gpus] = []

    def make(values: dict[str, int | float | str], *options: str) -> Gpus:
        made.append(gpus(nvml_library, tmp_path, values, *options))
        return made[-1]

    yield make
    for one in made:
        one.close()
