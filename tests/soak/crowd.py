"""100 clients at once on one service: ``python tests/soak/crowd.py [--seconds 60]``, as root.

60 ask, with a deadline of 30 s, 20 do not read what they asked for, and 20 are half open; half of them by TCP with TLS.
Fails if a client that asks gets no answer, or an error that is no documented bound. On stdout a summary in JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from crowd_scene import crowd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="probingd-test-"))
    root.chmod(0o755)
    try:
        found, beside = crowd(root, asked.seconds, asking=3, idle=2)
    finally:
        shutil.rmtree(root)
    times = {
        name: {f"p{share}": round(seconds[int(len(seconds) * share / 100)], 3) for share in (50, 99)}
        | {"max": round(seconds[-1], 3), "answers": len(seconds)}
        for name, seconds in (("crowd", found.seconds), ("root", beside.seconds))
    }
    bad = [*found.failed, *beside.failed]
    counts = {"clients": found.clients, "limited": found.limited, "starved": found.starved}
    print(json.dumps({**counts, **times, "bad": bad}))
    sys.exit(bool(bad or found.starved))


if __name__ == "__main__":
    main()
