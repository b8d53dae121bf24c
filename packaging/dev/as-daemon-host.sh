#!/bin/sh
# Runs a command as root so that the daemon's users can read the checkout. If they can read it already, the command runs
# directly. Else it runs in a mount namespace of its own, where an empty directory hides the first directory that they
# may not enter; only the checkout, and interpreters for tests in the home directory, are mounted into it. Nothing
# outside changes.
set -eu
umask 022
root=$(cd "$(dirname "$0")/../.." && pwd -P)

if [ "$(id -u)" != 0 ]; then
    exec sudo --preserve-env=CI,PROBINGD_TEST_LONG "PATH=$PATH" "$0" "$@"
fi

reaches() {
    setpriv --reuid=probing-service --regid=probing-service --clear-groups --inh-caps=-all \
        test -r "$root/pyproject.toml" -a -x "$root" 2>/dev/null
}

if [ "${1:-}" = --hide ]; then
    shift
    # The first closed directory on the way to the checkout, which the empty directory hides.
    closed=$1
    shift
    hold=$(mktemp -d /run/probingd-checkout-XXXXXX)
    kept=$root
    case "$HOME/" in
    "$closed"/*) [ ! -d "$HOME/.pyenv/versions" ] || kept="$kept $HOME/.pyenv/versions" ;;
    esac
    number=0
    for path in $kept; do
        mkdir "$hold/$number"
        mount --bind "$path" "$hold/$number"
        number=$((number + 1))
    done
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    number=0
    for path in $kept; do
        mkdir -p "$path"
        mount --bind "$hold/$number" "$path"
        umount "$hold/$number"
        rmdir "$hold/$number"
        number=$((number + 1))
    done
    rmdir "$hold"
    cd "$root"
    exec "$@"
fi

chmod go+rx "$root"
if reaches; then
    exec "$@"
fi
path=""
for part in $(dirname "$root" | tr '/' ' '); do
    path="$path/$part"
    setpriv --reuid=probing-service --regid=probing-service --clear-groups --inh-caps=-all test -x "$path" || break
done
mountpoint -q /sys/fs/bpf || mount -t bpf -o mode=0711 bpf /sys/fs/bpf
exec unshare --mount "$0" --hide "$path" "$@"
