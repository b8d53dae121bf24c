"""Folded stacks, as Brendan Gregg's FlameGraph reads them: ``outermost;…;innermost WEIGHT``, a line for each stack.

A difference has two weights, before and after, as its difffolded.pl writes it.
"""

from __future__ import annotations

from probing.api.text import escape
from probing.client.profile.model import Frame, Profile, label, merged, short_files

__all__ = ("folded", "folded_difference")


def folded(profile: Profile) -> str:
    """Returns folded stacks; weights are ns. A semicolon in a name becomes a colon."""
    weights = _weights(profile, short_files([profile]))
    return "".join(f"{stack} {ns}\n" for stack, ns in weights.items())


def folded_difference(base: Profile, chosen: Profile) -> str:
    """Returns folded stacks with two weights: ns in ``base``, then ns in ``chosen``."""
    short = short_files([base, chosen])
    before, after = _weights(base, short), _weights(chosen, short)
    stacks = dict.fromkeys([*before, *after])
    return "".join(f"{stack} {before.get(stack, 0)} {after.get(stack, 0)}\n" for stack in stacks)


def _weights(profile: Profile, short: dict[str, str]) -> dict[str, int]:
    frames = {frame for sample in profile.samples for frame in sample.frames}
    names = {frame: _name(frame, short) for frame in frames}
    weights: dict[str, int] = {}
    for sample in merged(profile.samples):
        line = ";".join([names[frame] for frame in sample.frames])
        weights[line] = weights.get(line, 0) + sample.ns
    return weights


def _name(frame: Frame, short: dict[str, str]) -> str:
    return escape(label(frame, short)).replace(";", ":")
