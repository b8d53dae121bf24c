#!/bin/sh
# Builds .build/gpu-kit: our wheel with its libbpf, wheels for CPython 3.12 of the dependencies that a machine with
# torch lacks, and the check itself. It runs on that machine without a registry: bash .build/gpu-kit/run
#
# Versions are from packaging/constraints.txt. Wheels that were downloaded before are not fetched again.
set -eu
umask 022
root=$(cd "$(dirname "$0")/.." && pwd -P)
kit=$root/.build/gpu-kit
cache=$root/.build/gpu-kit-wheels
pip=$root/.build/wheel-tools/bin/python
# The largest size of a kit that can be carried to a machine.
most_mb=60
# These come with CPython 3.12 and torch, and are too large to carry.
brought="numpy pyarrow"
carried="annotated-doc anyio cffi click cryptography duckdb grpcio grpcio-health-checking grpcio-reflection h11 idna linkify-it-py markdown-it-py
mdit-py-plugins mdurl msgspec nvidia-ml-py packaging platformdirs prometheus_client prompt_toolkit protobuf psutil pycparser pyelftools Pygments PyYAML rich shellingham
sqlglot starlette textual typer typing_extensions uvicorn wcwidth"

die() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

# Prints NAME==VERSION from the constraints.
pinned() {
    line=$(grep -i "^$1==" "$root/packaging/constraints.txt") || die "packaging/constraints.txt has no $1" "make constraints"
    echo "${line%%;*}" | tr -d ' '
}

"$root/packaging/wheel.sh" x86_64
mkdir -p "$cache"
wanted=""
for name in $carried; do wanted="$wanted $(pinned "$name")"; done
platforms=""
for version in 2_28 2_27 2_24 2_17 2_5; do platforms="$platforms --platform manylinux_${version}_x86_64"; done
# shellcheck disable=SC2086
"$pip" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
    $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --find-links "$cache" --dest "$cache" $wanted

rm -rf "$kit"
mkdir -p "$kit/wheels" "$kit/doubles"
cp "$root"/.build/wheels/probingd-*_x86_64.whl "$kit/wheels"
for pin in $wanted; do
    name=$(echo "${pin%%==*}" | tr '[:upper:]-' '[:lower:]_')
    found=$(find "$cache" -iname "$name-${pin#*==}-*.whl" | head -n 1)
    [ -n "$found" ] || die "no wheel of $pin" "remove $cache, and run this again"
    cp "$found" "$kit/wheels"
done
cp -R "$root/tests/gpu_kit" "$kit/gpu_kit"
find "$kit/gpu_kit" -name __pycache__ -prune -exec rm -rf {} +
mv "$kit/gpu_kit/run.sh" "$kit/run"
cp "$root"/tests/doubles/*.[ch] "$root"/tests/doubles/doubles.py "$root"/tests/doubles/nvml_double.py \
    "$root"/tests/doubles/ras_listener.py "$kit/doubles"
mv "$kit/gpu_kit/doubles_waiting.py" "$kit/waiting.py"
cp "$root/LICENSE" "$kit"
# shellcheck disable=SC2086
PYTHONPATH=$kit PYTHONDONTWRITEBYTECODE=1 "$pip" -m gpu_kit.wheels "$kit/wheels" $brought ||
    die "the wheels are not complete" "name what is missing in packaging/gpu-kit.sh"
sums=$(cd "$kit" && find . -type f -print0 | sort -z | xargs -0 sha256sum)
echo "$sums" >"$kit/SHA256SUMS"
size=$(du -sm --apparent-size "$kit" | cut -f 1)
[ "$size" -lt "$most_mb" ] || die "the kit has $size MB" "carry fewer wheels: less than $most_mb MB"
echo "$kit: $size MB, $(find "$kit/wheels" -name '*.whl' | wc -l) wheels"
