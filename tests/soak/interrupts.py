"""Ctrl-C at any moment of any command: ``python tests/soak/interrupts.py [--rounds 200] [--seed 0] [--within 1.0]``.

Each round runs a command of probingctl beside a node that answers, one that keeps it waiting or one that says nothing,
and presses Ctrl-C once or twice. It must leave ``--within`` seconds with a documented exit code, without a traceback,
and with the terminal as it was. On stdout a summary in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from interrupts import COMMANDS, PLACES, Nodes, check, delays, interrupted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=1.0)
    asked = parser.parse_args()
    generator = random.Random(asked.seed)
    # The fake nodes take the time of their rows from it.
    os.environ.setdefault("PYTEST_CURRENT_TEST", "soak (call)")
    took: dict[str, float] = {}
    late: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        nodes = Nodes(Path(directory))
        for number in range(asked.rounds):
            command, place = COMMANDS[number % len(COMMANDS)], generator.choice(PLACES)
            words = shlex.split(command)
            delay, again = delays(generator)
            with nodes.at(place) as address:
                left = interrupted(words, address, delay, again)
            check(words, left)
            took[command] = max(took.get(command, 0.0), left.seconds)
            if left.seconds > asked.within:
                late.append(f"{command} beside a node that {place}: {left.seconds:.2f} s")
        nodes.close()
    longest = {command: round(seconds, 3) for command, seconds in took.items()}
    print(json.dumps({"rounds": asked.rounds, "late": late, "longest_s": longest}, indent=2))
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
