#!/bin/bash
# Fetches files of a published wheel into .build/wheels/TARGET-VERSION: FILE... of its FOLDER. A name that ends in / is
# a whole folder. Complete wheels are not fetched again; partial wheels are.
#
#   wheel-files.sh NAME VERSION TARGET FOLDER FILE...
set -euo pipefail
cd "$(dirname "$0")/../.."

WHEELS=.build/wheels
PYTHON=.venv/bin/python
name=$1 version=$2 target=$WHEELS/$3-$2 folder=$4
shift 4
[ -e "$target" ] && exit
mkdir -p "$WHEELS"
work=$(mktemp -d "$WHEELS/fetching-$name.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching $name $version" >&2
# Constraints of this machine are for installed packages; this wheel is not installed.
PIP_CONSTRAINT=/dev/null $PYTHON -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
	-d "$work/wheel" "$name==$version"
$PYTHON - "$work" "$folder" "$@" <<-'PYTHON'
	import shutil, sys, zipfile
	from pathlib import Path
	work, folder, wanted = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
	(wheel,) = (work / "wheel").glob("*.whl")
	with zipfile.ZipFile(wheel) as archive:
	    for name in archive.namelist():
	        inner = name.removeprefix(f"{folder}/")
	        if inner == name or name.endswith("/") or ".." in name.split("/"):
	            continue
	        if any(inner == one or (one.endswith("/") and inner.startswith(one)) for one in wanted):
	            target = work / "files" / inner
	            target.parent.mkdir(parents=True, exist_ok=True)
	            with archive.open(name) as source, target.open("wb") as out:
	                shutil.copyfileobj(source, out)
PYTHON
mv "$work/files" "$target"
