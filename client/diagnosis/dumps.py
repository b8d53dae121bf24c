"""``diagnose --flight-recorder DIR``: the dumps of PyTorch's flight recorder in a directory, without a daemon."""

from __future__ import annotations

import re
from pathlib import Path

from probing.api.errors import NotFound, ProbingError
from probing.api.text import size
from probing.diagnosis.facts import MAX_RANKS, Missing
from probing.diagnosis.flight_recorder.dump import MAX_FILE, RankDump, read_dump
from probing.diagnosis.flight_recorder.hang import diagnose_dumps
from probing.diagnosis.ladder import Diagnosis

__all__ = ("from_dumps",)

# As TORCH_NCCL_DEBUG_INFO_TEMP_FILE makes them: a prefix, and the rank.
_RANK = re.compile(r"(\d{1,6})$")


def from_dumps(directory: Path) -> Diagnosis:
    """Returns what the dumps in ``directory`` show; the names of their files end with the rank.

    Raises NotFound where there is none. A file that cannot be read is one of ``missing``.
    """
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file() and _RANK.search(path.name))
    except OSError as e:
        raise NotFound(f"{directory} cannot be read: {e.strerror}") from e
    if not files:
        hint = "the names of dumps end with the rank, as nccl_trace_rank_3: TORCH_NCCL_DEBUG_INFO_TEMP_FILE sets them"
        raise NotFound(f"no dump is in {directory}", hint=hint)
    dumps: dict[int, RankDump] = {}
    missing: list[Missing] = []
    for path in files[:MAX_RANKS]:
        rank = int((_RANK.search(path.name) or [""])[0])
        try:
            dump = read_dump(rank, _content(path))
        except (ProbingError, OSError) as e:
            missing.append(Missing("history", f"the dump {path.name} cannot be read: {getattr(e, 'message', e)}", rank))
            continue
        if rank in dumps:
            missing.append(Missing("rank", f"the dump {path.name} is left out: another one is of the same rank", rank))
        else:
            dumps[rank] = dump
    return diagnose_dumps(directory.resolve().name, list(dumps.values()), missing)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise NotFound(f"it has more than {size(MAX_FILE)}")
    return data
