"""Writes the files of a report as a compressed archive that names neither its maker nor its machine."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Sequence
from typing import IO

from probing.client.bugreport.contents import File

__all__ = ("write_archive",)


def write_archive(sink: IO[bytes], files: Sequence[File], now: int) -> None:
    """Writes ``files`` to ``sink``; ``now`` is their time, in s since 1970."""
    # With a name, gzip would write it into the header.
    with (
        gzip.GzipFile("", "wb", fileobj=sink, mtime=now) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.name)
            entry.size, entry.mtime, entry.mode = len(file.data), now, 0o600
            archive.addfile(entry, io.BytesIO(file.data))
