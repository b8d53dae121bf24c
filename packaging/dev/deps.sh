#!/bin/sh
# Installs the system packages that the checkout needs, and creates the daemon's users. Quick the second time.
set -eu

packages="binutils bpftool clang debootstrap g++ gcc groff-base iproute2 libbpf-dev libbpf1 libc6-dev libexpat1-dev linux-libc-dev llvm mandoc musl-tools python3 python3-bpfcc python3-dev python3-venv systemd util-linux zlib1g-dev"

# bcc compiles against kernel headers; those of another kernel suffice for probes that read no kernel structures.
if [ ! -e /sys/kernel/kheaders.tar.xz ] && [ ! -e "/lib/modules/$(uname -r)/build" ]; then
    flavour=$(dpkg --print-architecture)
    ! grep -qi '^ID=ubuntu' /etc/os-release || flavour=generic
    packages="$packages linux-headers-$flavour"
fi

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
# Ubuntu has bpftool in the tools of each kernel.
case "$missing" in
*bpftool*) apt-cache show bpftool >/dev/null 2>&1 || [ ! -d /var/lib/apt/lists ] || missing=$(echo "$missing" | sed 's/ bpftool/ linux-tools-common linux-tools-generic/') ;;
esac
if [ -n "$missing" ]; then
    as_root apt-get update -q
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
fi

getent group probing >/dev/null || as_root groupadd --system probing
for user in probing probing-service probing-worker; do
    if ! getent passwd "$user" >/dev/null; then
        if [ "$user" = probing ]; then
            as_root useradd --system --gid probing --no-create-home --shell /usr/sbin/nologin "$user"
        else
            as_root useradd --system --user-group --no-create-home --shell /usr/sbin/nologin "$user"
        fi
    fi
done
