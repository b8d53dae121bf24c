#!/bin/bash
# Installs the frameworks that tests/frameworks watches into .build/frameworks, a virtual environment of its own.
# Quick the second time.
set -euo pipefail
cd "$(dirname "$0")/../.."

VENV=.build/frameworks
PACKAGES=(torch==2.13.0 accelerate==1.15.0 pytorch-lightning==2.6.6 deepspeed==0.19.8 "ray[train]==2.60.0" jax==0.10.2 setproctitle==1.3.8)

[ -e "$VENV/bin/python" ] || /usr/bin/python3 -m venv "$VENV"
if ! printf '%s\n' "${PACKAGES[@]}" | cmp -s - "$VENV/packages"; then
	# DeepSpeed looks for torch when it is built.
	"$VENV/bin/pip" install -q --disable-pip-version-check "${PACKAGES[0]}" setuptools wheel
	"$VENV/bin/pip" install -q --disable-pip-version-check --no-build-isolation "${PACKAGES[@]}"
	printf '%s\n' "${PACKAGES[@]}" >"$VENV/packages"
fi
