#!/bin/bash
# Fetches the library with the collectives from published jaxlib wheels, into .build/wheels/jaxlib-VERSION/.
#
#   jax-wheels.sh               the versions below, some 80 MB of downloads each
#   jax-wheels.sh VERSION...    these versions
set -euo pipefail

VERSIONS=(0.10.2 0.10.0 0.9.2 0.9.0 0.8.3 0.8.0 0.7.2 0.7.0 0.6.2 0.6.0 0.5.3 0.4.38)
for version in "${@:-${VERSIONS[@]}}"; do
	"$(dirname "$0")/wheel-files.sh" jaxlib "$version" jaxlib jaxlib libjax_common.so xla_extension.so
done
