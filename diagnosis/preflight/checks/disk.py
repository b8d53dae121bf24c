"""Each file system that can be written has space and inodes left, and those of servers answer."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import share_text, size
from probing.diagnosis.preflight.facts import Case, FileSystem
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check",)

NAME = "disk"
LEAST_SHARE, LOW_SHARE = 0.02, 0.1
# Above this much free, a small share of a huge disk is no problem.
PLENTY_BYTES = 200 << 30
# Pages of the kernel and images that are full by nature.
_IGNORED = ("squashfs", "iso9660", "erofs", "overlay", "tmpfs", "devtmpfs", "ramfs")


def check(case: Case) -> Iterator[Result]:
    """Fails below LEAST_SHARE, warns below LOW_SHARE; fails for a file system that does not answer."""
    good = []
    for node in case.nodes:
        if not node.file_systems:
            why = node.problem("file_systems") or "none were read"
            yield skipped(NAME, f"the file systems of {node.node} are not known: {why}", [node.node])
            continue
        found = [result for fs in node.file_systems for result in _of(node.node, fs)]
        yield from found
        if not found:
            good.append(node.node)
    if good:
        yield Result(NAME, PASS, f"file systems have space and answer on {names(good)}")


def _of(node: str, fs: FileSystem) -> Iterator[Result]:
    if fs.answers is False:
        yield Result(NAME, FAIL, f"{fs.mount_point} of {node} does not answer", (node,), "whoever reads it will hang")
        return
    if fs.read_only or fs.fs_type in _IGNORED or not fs.size_bytes or fs.available_bytes is None:
        return
    share = fs.available_bytes / fs.size_bytes
    if share < LOW_SHARE and fs.available_bytes < PLENTY_BYTES:
        text = f"{fs.mount_point} of {node} has {size(fs.available_bytes)} free, {share_text(share)}"
        yield Result(NAME, FAIL if share < LEAST_SHARE else WARN, text, (node,), "make room for checkpoints and logs")
    if fs.inodes and fs.inodes_used is not None and fs.inodes_used > 0.98 * fs.inodes:
        yield Result(NAME, FAIL, f"{fs.mount_point} of {node} has no inodes left", (node,), "remove small files")
