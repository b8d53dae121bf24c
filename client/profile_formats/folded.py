"""Folded stacks, as Brendan Gregg's FlameGraph reads them: ``outermost;…;innermost WEIGHT``, a line a stack.

A difference has two weights, before and after, as its difffolded.pl writes it.
"""

from __future__ import annotations

from probing.client.profile_model import Profile, Sample, label, merged, short_files
from probing.client.text import escape

__all__ = ("folded", "folded_difference")


def folded(profile: Profile) -> str:
    """Weights are ns. What separates frames in this format is written as a colon within a name."""
    weights = _weights(profile, short_files([profile]))
    return "".join(f"{stack} {ns}\n" for stack, ns in weights.items())


def folded_difference(base: Profile, chosen: Profile) -> str:
    """ns in ``base``, then ns in ``chosen``."""
    short = short_files([base, chosen])
    before, after = _weights(base, short), _weights(chosen, short)
    stacks = dict.fromkeys([*before, *after])
    return "".join(f"{stack} {before.get(stack, 0)} {after.get(stack, 0)}\n" for stack in stacks)


def _weights(profile: Profile, short: dict[str, str]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for sample in merged(profile.samples):
        line = _line(sample, short)
        weights[line] = weights.get(line, 0) + sample.ns
    return weights


def _line(sample: Sample, short: dict[str, str]) -> str:
    return ";".join(escape(label(frame, short)).replace(";", ":") for frame in sample.frames)
