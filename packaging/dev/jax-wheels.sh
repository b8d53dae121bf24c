#!/bin/bash
# The library of published jaxlib wheels that holds its collectives, into .build/wheels/jaxlib-VERSION/.
#
#   jax-wheels.sh               the versions below, some 80 MB of downloads each
#   jax-wheels.sh VERSION...    these versions
#
# Complete wheels are not fetched again; partial ones are.
set -euo pipefail
cd "$(dirname "$0")/../.."

VERSIONS=(0.10.2 0.10.0 0.9.2 0.9.0 0.8.3 0.8.0 0.7.2 0.7.0 0.6.2 0.6.0 0.5.3 0.4.38)
WHEELS=.build/wheels
PYTHON=.venv/bin/python

fetch() {
	local version=$1 target=$WHEELS/jaxlib-$1 work
	[ -e "$target" ] && return
	work=$(mktemp -d "$WHEELS/fetching-jaxlib.XXXXXX")
	# shellcheck disable=SC2064  # the folder of now
	trap "rm -rf '$work'" EXIT
	echo "fetching jaxlib $version" >&2
	$PYTHON -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: \
		-d "$work/wheel" "jaxlib==$version"
	mkdir "$work/files"
	(cd "$work/files" && unzip -q -j ../wheel/*.whl 'jaxlib/libjax_common.so' 'jaxlib/xla_extension.so' 2>/dev/null || [ $? = 11 ])
	mv "$work/files" "$target"
	rm -rf "$work"
	trap - EXIT
}

mkdir -p "$WHEELS"
for version in "${@:-${VERSIONS[@]}}"; do
	fetch "$version"
done
