#!/bin/bash
# Fetches NCCL and CUDA runtime libraries from their published wheels, into .build/wheels/NAME-VERSION/{lib,include}.
#
#   nccl-wheels.sh          the versions for tests/wheels: seven of NCCL, some 2 GB of downloads
#   nccl-wheels.sh all      every released version from 2.18, some 6 GB, to make the table of layouts
#   nccl-wheels.sh prune    remove the versions that only the table needs
#
# Complete wheels are not fetched again; partial ones are.
set -euo pipefail
cd "$(dirname "$0")/../.."

TESTED=(2.18.3 2.21.5 2.24.3 2.27.5 2.28.9 2.30.7 2.32.3)
OTHERS=(2.18.1 2.19.3 2.20.5 2.22.3 2.23.4 2.25.1 2.25.1.post1 2.26.2 2.26.2.post1 2.26.5 2.27.3 2.27.6 2.27.7
	2.28.3 2.28.7 2.29.2 2.29.3 2.29.7 2.30.3 2.30.4 2.31.2)
WHEELS=.build/wheels
PYTHON=.venv/bin/python

# fetch NAME VERSION FOLDER FILE...: these files in nvidia/FOLDER of the wheel
fetch() {
	local name=$1 version=$2 folder=$3 target=$WHEELS/$1-$2 work
	shift 3
	[ -e "$target" ] && return
	work=$(mktemp -d "$WHEELS/fetching.XXXXXX")
	echo "fetching $name $version" >&2
	if ! $PYTHON -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
		-d "$work/wheel" "$name==$version"; then
		rm -rf "$work"
		return 1
	fi
	$PYTHON - "$work" "$folder" "$@" <<-'PYTHON'
		import shutil, sys, zipfile
		from pathlib import Path
		work, folder = Path(sys.argv[1]), sys.argv[2]
		(wheel,) = (work / "wheel").glob("*.whl")
		with zipfile.ZipFile(wheel) as archive:
		    for name in sys.argv[3:]:
		        target = work / "files" / name
		        target.parent.mkdir(parents=True, exist_ok=True)
		        with archive.open(f"nvidia/{folder}/{name}") as source, target.open("wb") as out:
		            shutil.copyfileobj(source, out)
	PYTHON
	mv "$work/files" "$target"
	rm -rf "$work"
}

nccl() {
	for version; do
		fetch nvidia-nccl-cu12 "$version" nccl lib/libnccl.so.2 include/nccl.h
	done
}

mkdir -p "$WHEELS"
rm -rf "$WHEELS"/fetching.*
case "${1:-tested}" in
tested | all)
	nccl "${TESTED[@]}"
	fetch nvidia-cuda-runtime-cu12 12.9.79 cuda_runtime lib/libcudart.so.12
	;;&
all)
	nccl "${OTHERS[@]}"
	;;
prune)
	for version in "${OTHERS[@]}"; do
		rm -rf "$WHEELS/nvidia-nccl-cu12-$version"
	done
	;;
tested) ;;
*)
	sed -n '2,/^$/p' "$0" >&2
	exit 2
	;;
esac
