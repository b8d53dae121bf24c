#!/bin/bash
# Fetches lib/libtorch_cpu.so and include from published torch wheels into .build/wheels/torch-VERSION, for tests/wheels.
#
#   torch-wheels.sh               the versions below, some 600 MB of downloads each
#   torch-wheels.sh VERSION...    these versions
set -euo pipefail

# The newest three, and the last whose tensors have names.
VERSIONS=(2.15.0 2.14.1 2.14.0 2.12.1)
for version in "${@:-${VERSIONS[@]}}"; do
	"$(dirname "$0")/wheel-files.sh" torch "$version" torch torch lib/libtorch_cpu.so include/
done
