#!/bin/bash
# Installs the kit into a virtual environment of its own, starts probingd and checks it on this machine's GPU; as root.
#
#   run [--out DIR] [--parts NAME,...] [--rehearse]
#
# The report comes into DIR, by default $OUT, else gpu-kit-report beside the kit. GPU_KIT_PYTHON names the interpreter of
# the jobs, by default python3: it has torch, and numpy and pyarrow for probingd. --rehearse: without a GPU, by doubles.
set -euo pipefail
umask 022
GPU_KIT_BEGUN=$(date +%s.%N)
kit=$(cd "$(dirname "$0")" && pwd -P)
GPU_KIT_PYTHON=${GPU_KIT_PYTHON:-$(command -v python3)}
export GPU_KIT_BEGUN GPU_KIT_PYTHON OUT=${OUT:-$(dirname "$kit")/gpu-kit-report}

die() {
	printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
	exit 1
}

[ "$(id -u)" = 0 ] || die "the daemon has to be started as root" "run this as root"
version=$("$GPU_KIT_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.12 ] || die "$GPU_KIT_PYTHON is CPython $version, and the wheels are for 3.12" "set GPU_KIT_PYTHON"
(cd "$kit" && sha256sum --quiet -c SHA256SUMS) || die "files of the kit have changed" "make gpu-kit"

# Not below the kit: the daemon's users have to get there.
place=$(mktemp -d /var/tmp/probingd-gpu-kit-XXXXXX)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place"
"$GPU_KIT_PYTHON" -m venv --without-pip "$place/venv"
packages=$place/venv/lib/python3.12/site-packages
"$GPU_KIT_PYTHON" "$kit/gpu_kit/brought.py" "$packages" numpy pyarrow
"$GPU_KIT_PYTHON" -m pip --python "$place/venv/bin/python" install -q --no-index --no-deps --no-compile \
	--disable-pip-version-check --root-user-action ignore "$kit"/wheels/*.whl
# The daemon's users may not write here; what only the screens of probingctl need stays as it is.
"$place/venv/bin/python" -m compileall -q -j 0 -x '/(textual|pygments|prompt_toolkit|linkify_it|mdit_py_plugins)/' "$packages" \
	>/dev/null || true
export PYTHONPATH=$kit
"$place/venv/bin/python" -m gpu_kit.wheels || echo "probingd may not work with these packages" >&2
mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf || true
echo "installed after $(echo "$(date +%s.%N) - $GPU_KIT_BEGUN" | bc -l 2>/dev/null || echo ?) s" >&2
"$place/venv/bin/python" -m gpu_kit "$@"
