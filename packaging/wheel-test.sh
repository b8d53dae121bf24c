#!/bin/sh
# Installs a wheel into a Debian without compiler, libbpf and the daemon's users, runs the daemon there and watches a job:
# wheel-test.sh WHEEL. As root.
#
# The Debian is made once, in the user's cache. The dependencies come from the package index, by the host's pip.
set -eu
umask 022

root=$(cd "$(dirname "$0")/.." && pwd -P)
wheel=$1
pip=$root/.build/wheel-tools/bin/python
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/probingd
base=$cache/$suite-bare

say() { echo "wheel-test: $*"; }

# Everything below runs in a mount namespace of its own, which ends with it.
if [ "${2:-}" != --inside ]; then
    if [ ! -e "$base.made" ]; then
        say "making $base, a minute"
        rm -rf "$base"
        mkdir -p "$cache"
        debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$base" >"$base.log" || {
            tail "$base.log" >&2
            exit 1
        }
        touch "$base.made"
    fi
    exec unshare --mount "$0" "$(readlink -f "$wheel")" --inside
fi

host=$(mktemp -d)
daemon="" job=""
finish() {
    code=$?
    [ "$code" = 0 ] || { echo "--- the daemon's log" && tail -n 40 "$host/tmp/daemon.log"; } >&2
    for pid in $daemon $job; do kill "$pid" 2>/dev/null && wait "$pid" || true; done
    umount --recursive "$host/proc" "$host/sys" "$host/dev" "$host/run" || true
    rm -rf --one-file-system "$host"
    exit "$code"
}
trap finish EXIT
chmod 755 "$host"
cp -a "$base/." "$host"
for path in proc sys dev; do mount --rbind "/$path" "$host/$path" && mount --make-rslave "$host/$path"; done
# The daemon gets sockets and pins of its own.
mount -t tmpfs -o mode=755 tmpfs "$host/run"
mount -t bpf -o mode=755 bpf "$host/sys/fs/bpf"

enter() { exec chroot "$host" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"; }
inside() { (enter "$@"); }
# Waits up to 60 s for a command that succeeds and prints something.
expect() {
    what=$1
    shift
    end=$(($(date +%s) + 60))
    until found=$("$@" 2>"$host/tmp/error") && [ -n "$found" ]; do
        [ -z "$daemon" ] || kill -0 "$daemon" || { say "the daemon ended" >&2 && exit 1; }
        [ "$(date +%s)" -lt "$end" ] || { say "not seen: $what; $(cat "$host/tmp/error")" >&2 && exit 1; }
        sleep 0.2
    done
    say "$what: $(echo "$found" | tr '\n' ' ')"
}
rows() { inside /srv/probing/bin/probingctl query -f csv "$1" | tail -n +2; }

for name in clang gcc cc llvm-strip bpftool; do
    ! inside sh -c "command -v $name" || { say "the Debian has $name" >&2 && exit 1; }
done
[ -z "$(find "$host/usr/lib" -name 'libbpf*')" ] || { say "the Debian has a libbpf" >&2 && exit 1; }

mkdir "$host/srv/wheels"
cp "$wheel" "$host/srv/wheels"
"$pip" -m pip download -q --disable-pip-version-check --only-binary :all: --dest "$host/srv/wheels" "$wheel"
begun=$(date +%s%3N)
inside python3 -m venv /srv/probing
inside /srv/probing/bin/pip install -q --no-index --find-links /srv/wheels probingd
say "installed in $(($(date +%s%3N) - begun)) ms: $(inside /srv/probing/bin/probingd version | head -n 1)"
inside /srv/probing/bin/probingd check >"$host/tmp/check" || { cat "$host/tmp/check" >&2 && exit 1; }
grep -E '^[a-z]+ +(libbpf|users|programs)' "$host/tmp/check"
grep -q 'libbpf .*own: the host has no libbpf.so.1' "$host/tmp/check"

enter /srv/probing/bin/probingd run >"$host/tmp/daemon.log" 2>&1 &
daemon=$!
expect "log" grep -x ready "$host/tmp/daemon.log"
cat >"$host/srv/train.py" <<'EOF'
import time
def step():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
while True:
    step()
EOF
enter RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=23 python3 /srv/train.py </dev/null >/dev/null 2>&1 &
job=$!
expect "its start, from the kernel" rows "SELECT event FROM process.events WHERE pid = $job AND event = 'start'"
expect "rank" rows "SELECT rank FROM process.processes WHERE pid = $job AND role = 'trainer' LIMIT 1"
expect "samples of its function, from the kernel" rows "SELECT count(*) FROM python.samples JOIN python.stacks USING (stack_id)
    WHERE pid = $job AND frames[1].func = 'step' HAVING count(*) > 0"
kill "$job"
wait "$job" || true
expect "its end, from the kernel" rows "SELECT signal FROM process.events WHERE pid = $job AND event = 'exit'"
job=""
kill "$daemon"
wait "$daemon" || { say "the daemon ended with $?" >&2 && exit 1; }
daemon=""
say "passed"
