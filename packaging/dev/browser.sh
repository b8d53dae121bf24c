#!/bin/sh
# Installs Debian's Chromium, in which tests open the page, and node with npm, which build it. Quick the second time.
set -eu

missing=""
command -v chromium >/dev/null || missing="chromium"
command -v node >/dev/null || missing="$missing nodejs"
command -v npm >/dev/null || missing="$missing npm"
[ -n "$missing" ] || exit 0
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}
as_root apt-get update -q >/dev/null
# shellcheck disable=SC2086
as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing || {
    echo "browser: apt has no $missing here" >&2
    exit 1
}
