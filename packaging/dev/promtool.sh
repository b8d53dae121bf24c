#!/bin/sh
# Gets .build/promtool/promtool, which checks the page of /metrics, out of Debian's package prometheus: the package itself
# would take 100 MB and start a server. Quick the second time.
set -eu
cd "$(dirname "$0")/../.."

tool=.build/promtool/promtool
if [ -x "$tool" ] || command -v promtool >/dev/null; then exit 0; fi
mkdir -p .build/promtool
cd .build/promtool
if ! apt-get download -q prometheus >/dev/null 2>&1; then
    [ "$(id -u)" != 0 ] || apt-get update -q >/dev/null
    apt-get download -q prometheus >/dev/null 2>&1 || {
        echo "promtool: apt has no package prometheus here" >&2
        exit 1
    }
fi
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool.new
rm -f prometheus_*.deb
chmod 755 promtool.new
mv promtool.new promtool
