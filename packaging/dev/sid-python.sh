#!/bin/sh
# Makes .build/sid: a small Debian unstable with the CPythons that are newer than the host's, for the tests of Python
# stacks; and in .build/sid-bin a program for each, that runs it as a container would: with a root and mounts of its own.
# Needs root and debootstrap; quick the second time. For a newer state of unstable, remove .build/sid.
set -eu
umask 022
cd "$(dirname "$0")/../.."

root=$PWD/.build/sid
programs=$PWD/.build/sid-bin
stamp=$root/etc/probingd-pythons
# The packages that must exist, and packages that are installed, too, if unstable has them.
required="python3.14"
wanted="python3.13 python3.15"

# Only mount, chroot and the shell's exec come before the interpreter, so that its process is the one that was started.
# It sees the tests where they are, and writes into its own /tmp.
make_programs() {
    rm -rf "$programs"
    mkdir -p "$programs" "$root$PWD/tests"
    sed 1d "$stamp" | while read -r python; do
        cat >"$programs/${python##*/}" <<END
#!/bin/sh
exec unshare --mount --propagation private /bin/sh -ec '
    mount --bind "$PWD/tests" "$root$PWD/tests"
    mount --bind /proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" "\$0" "\$@"' $python "\$@"
END
        chmod 755 "$programs/${python##*/}"
    done
}

if [ -e "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$required $wanted" ]; then
    [ -d "$programs" ] || make_programs
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "sid-python: making $root takes root" >&2
    exit 1
fi
for tool in debootstrap chroot; do
    if ! command -v "$tool" >/dev/null; then
        echo "sid-python: $tool is not installed" >&2
        exit 1
    fi
done

# The mirror of this host's own Debian; not the mirror of its security updates.
mirror=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' | sed -n 's/^Debian|Debian|//p' | head -n 1)
if [ -z "$mirror" ]; then
    echo "sid-python: apt has no sources of Debian here; run apt-get update, or name a mirror in them" >&2
    exit 1
fi

# A partial tree is removed and made again; nothing is mounted in it, so that removing it removes nothing else.
rm -rf "$root"
mkdir -p "$root"
trap 'if [ ! -e "$stamp" ]; then rm -rf "$root"; fi' EXIT
echo "sid-python: making .build/sid, a few minutes" >&2
log=$root.log
if ! debootstrap --variant=minbase --include=ca-certificates sid "$root" "$mirror" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    exit 1
fi

cp /etc/resolv.conf "$root/etc/resolv.conf"
in_sid() {
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}
packages=$required
for package in $wanted; do
    if in_sid apt-cache show "$package" >/dev/null 2>&1; then
        packages="$packages $package"
    fi
done
# shellcheck disable=SC2086
if ! in_sid apt-get install -q -y --no-install-recommends $packages >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    exit 1
fi
in_sid apt-get clean
{
    echo "$required $wanted"
    for package in $packages; do echo "/usr/bin/$package"; done
} >"$stamp.new"
mv "$stamp.new" "$stamp"
make_programs
echo "sid-python: made with $packages" >&2
