"""Which GPUs the environment of a process shows to CUDA, and which of them is the rank's.

CUDA_VISIBLE_DEVICES: CUDA C++ Programming Guide, "CUDA Environment Variables"; indices count what the container shows.
NVIDIA_VISIBLE_DEVICES: NVIDIA Container Toolkit, "Enumerating GPUs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ("Place", "own_device", "visible_devices")

MAX_TEXT, MAX_DEVICES = 4_096, 128


class Place(NamedTuple):
    """A GPU (``mig`` None) or a MIG device. ``names`` are its UUID and older forms of it."""

    key: str
    device_id: int
    mig: int | None
    names: tuple[str, ...]


def visible_devices(environ: Mapping[str, str], places: Sequence[Place]) -> list[Place]:
    """Returns what CUDA shows to the process, in CUDA's order; of a GPU in MIG mode its MIG devices."""
    shown = _in_container(environ.get("NVIDIA_VISIBLE_DEVICES"), places)
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return _usable(shown)
    found: list[Place] = []
    for word in _words(text):
        place = _named(word, shown) or _numbered(word, shown)
        # CUDA ignores all that follows what it does not know.
        if place is None or place in found:
            break
        found.append(place)
    return found


def own_device(environ: Mapping[str, str], places: Sequence[Place], local_rank: int | None) -> Place | None:
    """Returns the device of a rank: the only visible one, or by custom the one with the number of the local rank.

    None without a word of devices in the environment: then nothing says that the process uses any.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ and "NVIDIA_VISIBLE_DEVICES" not in environ:
        return None
    found = visible_devices(environ, places)
    if len(found) == 1:
        return found[0]
    return found[local_rank] if local_rank is not None and 0 <= local_rank < len(found) else None


def _in_container(text: str | None, places: Sequence[Place]) -> list[Place]:
    """Returns what the container runtime lets in; all, where it does not say or says it in another way."""
    words = _words(text or "all")
    if not words or words[0] in ("all", "none", "void"):
        return list(places)
    found = []
    for word in words:
        gpu, colon, mig = word.partition(":")
        if colon and gpu.isdecimal() and mig.isdecimal():
            # GPU:MIG, both as numbers.
            found += [p for p in places if (str(p.device_id), str(p.mig)) == (gpu, mig)]
        elif (place := _named(word, places) or _numbered(word, places)) is not None:
            found += [p for p in places if p == place or (place.mig is None and p.device_id == place.device_id)]
    # In the container they are numbered in the order of the host.
    return [place for place in places if place in found] or list(places)


def _usable(places: Sequence[Place]) -> list[Place]:
    split = {place.device_id for place in places if place.mig is not None}
    return [place for place in places if place.mig is not None or place.device_id not in split]


def _named(word: str, places: Sequence[Place]) -> Place | None:
    """Returns the one device whose name begins with ``word``; of a GPU in MIG mode its first MIG device."""
    if not word.startswith(("GPU-", "MIG-")):
        return None
    found = {place.key: place for place in places for name in place.names if name.startswith(word)}
    if len(found) != 1:
        return None
    (place,) = found.values()
    return _first_part(place, places)


def _numbered(word: str, places: Sequence[Place]) -> Place | None:
    if not word.isdecimal() or len(word) > 6:
        return None
    gpus = sorted({place.device_id for place in places})
    if int(word) >= len(gpus):
        return None
    of_gpu = [place for place in places if place.device_id == gpus[int(word)]]
    return _first_part(next((place for place in of_gpu if place.mig is None), of_gpu[0]), places)


def _first_part(place: Place, places: Sequence[Place]) -> Place:
    parts = (other for other in places if other.device_id == place.device_id and other.mig is not None)
    return place if place.mig is not None else next(parts, place)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text[:MAX_TEXT].split(",")[:MAX_DEVICES] if word.strip()]
