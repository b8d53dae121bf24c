#!/bin/bash
# The files of published torch wheels that tests/wheels needs, into .build/wheels/torch-VERSION/{lib/libtorch_cpu.so,include}.
#
#   torch-wheels.sh               the versions below, some 600 MB of downloads each
#   torch-wheels.sh VERSION...    these versions
#
# Complete wheels are not fetched again; partial ones are.
set -euo pipefail
cd "$(dirname "$0")/../.."

# The newest three, and the last whose tensors have names.
VERSIONS=(2.15.0 2.14.1 2.14.0 2.12.1)
WHEELS=.build/wheels
PYTHON=.venv/bin/python

fetch() {
	local version=$1 target=$WHEELS/torch-$1 work
	[ -e "$target" ] && return
	work=$(mktemp -d "$WHEELS/fetching-torch.XXXXXX")
	# shellcheck disable=SC2064  # the folder of now
	trap "rm -rf '$work'" EXIT
	echo "fetching torch $version" >&2
	$PYTHON -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
		-d "$work/wheel" "torch==$version"
	$PYTHON - "$work" <<-'PYTHON'
		import shutil, sys, zipfile
		from pathlib import Path
		work = Path(sys.argv[1])
		(wheel,) = (work / "wheel").glob("*.whl")
		with zipfile.ZipFile(wheel) as archive:
		    for name in archive.namelist():
		        inner = name.removeprefix("torch/")
		        if name.endswith("/") or ".." in name.split("/"):
		            continue
		        if inner == "lib/libtorch_cpu.so" or inner.startswith("include/"):
		            target = work / "files" / inner
		            target.parent.mkdir(parents=True, exist_ok=True)
		            with archive.open(name) as source, target.open("wb") as out:
		                shutil.copyfileobj(source, out)
	PYTHON
	mv "$work/files" "$target"
	rm -rf "$work"
	trap - EXIT
}

mkdir -p "$WHEELS"
for version in "${@:-${VERSIONS[@]}}"; do
	fetch "$version"
done
