#!/bin/bash
# Installs Holistic Trace Analysis into .build/hta, a virtual environment of its own, without the notebooks that it
# depends on. Quick the second time.
set -euo pipefail
cd "$(dirname "$0")/../.."

PACKAGES=(pandas==3.1.1 plotly==7.1.0 networkx==3.6.1 psutil==7.2.2 pydot==4.0.1 pyyaml==6.0.4)
ITSELF=HolisticTraceAnalysis==0.5.0

venv=.build/hta
[ -e "$venv/bin/python" ] || /usr/bin/python3 -m venv "$venv"
if ! printf '%s\n' "$ITSELF" "${PACKAGES[@]}" | cmp -s - "$venv/packages"; then
	"$venv/bin/pip" install -q --disable-pip-version-check "${PACKAGES[@]}"
	"$venv/bin/pip" install -q --disable-pip-version-check --no-deps "$ITSELF"
	printf '%s\n' "$ITSELF" "${PACKAGES[@]}" >"$venv/packages"
fi
