"""The main thread or another one loads code into a CUDA context, and holds its lock."""

from __future__ import annotations

import re

from probing.diagnosis.activity.scene import Scene, Seen, user_frame
from probing.diagnosis.facts import Thread
from probing.diagnosis.words import clean, frame_text

__all__ = ("find_context_lock",)

_KIND = "cuda_context_lock"
_FRAMES = 32
# Loading waits until the kernels of the context have ended; with lazy loading (CUDA 11.7) a first launch loads.
_LOADS = re.compile(
    r"cuLibrary(?:LoadData|LoadFromFile|GetKernel)\w*|cuModule(?:Load|GetFunction)\w*|cudaLibraryLoad\w*"
)
_WAITS = re.compile(
    r"cu(?:da)?(?:Mem(?:cpy|set|Alloc|Free)|Launch|StreamSynchronize|EventSynchronize|EventRecord|CtxSynchronize)\w*"
)


def find_context_lock(scene: Scene) -> Seen | None:
    """Returns whether the main thread waits in CUDA while a thread loads a module, or loads one itself.

    A kernel that waits for a peer does not end, so the load that waits for it does not either, and nor does any call
    that needs the context.
    """
    main = scene.main
    if main is None or scene.letter == "R":
        return None
    if load := _call(main, _LOADS):
        does = f"loads code into its CUDA context{scene.where} ({load}), which waits for the kernels that run there"
        return Seen(_KIND, does, frame=scene.user, evidence=(scene.kernel,))
    call = _call(main, _WAITS)
    if not call:
        return None
    for thread in scene.threads:
        if thread is not main and (load := _call(thread, _LOADS)):
            frame = user_frame(thread.frames)
            place = f", in {frame_text(frame)}" if frame is not None else ""
            who = f"thread {clean(thread.name)} ({thread.tid})"
            does = f"waits in {call}{scene.where} for its CUDA context: {who} loads code into it"
            return Seen(_KIND, does, frame=scene.user, evidence=(f"{who} is in {load}{place}", scene.kernel))
    return None


def _call(thread: Thread, calls: re.Pattern[str]) -> str:
    """Returns the function of CUDA on the native stack of ``thread``; empty if it is not there."""
    native = (frame.func for frame in thread.frames[:_FRAMES] if frame.native)
    return next((match[0] for name in native if (match := calls.fullmatch(name))), "")
