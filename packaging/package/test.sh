#!/bin/sh
# Installs, upgrades, removes and purges the deb in a Debian of its own, and compares the files: test.sh DEB NEWER_DEB.
#
# The Debian is made once, in the user's cache. It has no systemd running: that needs a machine of its own.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd -P)
deb=$1 newer=$2
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/probingd
base=$cache/$suite-packages

if [ ! -e "$base.made" ]; then
    rm -rf "$base"
    mkdir -p "$cache"
    debootstrap --variant=minbase --include=python3.11,libbpf1,systemd "$suite" "$base" >"$base.log" || {
        tail "$base.log" >&2
        exit 1
    }
    touch "$base.made"
fi
host=$(mktemp -d)
trap 'rm -rf "$host"' EXIT
cp -a "$base/." "$host"
cp "$deb" "$host/old.deb"
cp "$newer" "$host/new.deb"

# Its own mounts and processes, which end with it.
inside() { unshare --mount --pid --fork --root="$host" --mount-proc -- env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
# dpkg's own records and caches change with any package.
files() { find "$host" -xdev -not -path "$host/var/*/dpkg*" -not -path "$host/var/cache/*" -not -path "$host/proc/*" -printf '/%P\n' | sort; }
left() { files | comm -13 "$host.before" - | tr '\n' ' '; }
expect() {
    [ "$2" = "$3" ] || { echo "error: after $1 there is: $2" && echo "expected: $3" && exit 1; } >&2
    echo "ok: $1"
}

files >"$host.before"
trap 'rm -rf "$host" "$host.before"' EXIT
begun=$(date +%s)
inside dpkg --install /old.deb
echo "installed in $(($(date +%s) - begun)) s"
expect "version" "$(inside probingd version | head -1)" "probingd $(inside dpkg-query -W -f '${Version}' probingd)"
inside probingctl --help >/dev/null
inside getent passwd probing probing-service probing-worker >/dev/null
# Each module can be imported, and the engine reads a segment.
inside /opt/probingd/bin/python -I - <<'EOF'
import importlib, pkgutil, duckdb, pyarrow as pa, pyarrow.parquet as pq, probing
names = [m.name for m in pkgutil.walk_packages(probing.__path__, "probing.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
pq.write_table(pa.table({"n": list(range(23))}), "/tmp/t.parquet", compression="zstd")
assert duckdb.sql("SELECT sum(n) FROM '/tmp/t.parquet'").fetchall() == [(253,)]
print(f"{len(names)} modules")
EOF
rm "$host/tmp/t.parquet"
echo 'node_name = "mine"' >"$host/etc/probingd/probingd.toml"
inside dpkg --force-confold --install /new.deb
expect "the configuration outlives an upgrade" "$(cat "$host/etc/probingd/probingd.toml")" 'node_name = "mine"'
inside dpkg --remove probingd
mkdir -p "$host/var/lib/probingd" && touch "$host/var/lib/probingd/rows"
expect "removal" "$(left)" "/etc/probingd /etc/probingd/probingd.toml /var/lib/probingd /var/lib/probingd/rows "
inside dpkg --purge probingd
expect "purge" "$(left)" ""
