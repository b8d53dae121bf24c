"""Scores `diagnose --flight-recorder` on NVRx's dumps: ``python tests/soak/nvrx_dumps.py .../fr_traces``.

Each folder has the dumps of a job, and ``fault_injection.log`` with the ranks at fault. Exits with 1 unless exactly
these are named in each.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from probing.client.diagnosis.asking import from_dumps

_TRUTH = re.compile(r"^Fault ranks: \[([\d, ]*)\]", re.MULTILINE)


def main(folder: Path) -> int:
    print("| set | injected | named | verdict |\n|---|---|---|---|")
    wrong = 0
    logs = sorted(folder.glob("*/fault_injection.log"))
    for log in logs:
        match = _TRUTH.search(log.read_text())
        injected = [int(rank) for rank in match[1].split(",")] if match else []
        findings = from_dumps(log.parent).findings
        named = sorted({culprit.rank for finding in findings for culprit in finding.culprits})
        wrong += named != injected
        verdicts = ", ".join(finding.verdict.id for finding in findings)
        print(f"| {log.parent.name} | {injected} | {named} | {verdicts} |")
    print(f"\n{len(logs) - wrong} of {len(logs)} right")
    return 1 if wrong or not logs else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
