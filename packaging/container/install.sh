#!/bin/sh
# Installs the package in an image of Debian 12; the Containerfile runs it with the context at /context.
set -eu
export DEBIAN_FRONTEND=noninteractive

# The ids are fixed, so that a state directory and a Secret of the node fit every image. Neither Debian nor systemd
# gives these ids to other users: they lie between their ranges.
groupadd --gid 60770 probing
useradd --system -K SYS_UID_MAX=60999 --uid 60770 --gid 60770 --no-create-home --shell /usr/sbin/nologin probing
groupadd --gid 60771 probing-service
useradd --system -K SYS_UID_MAX=60999 --uid 60771 --gid 60771 --groups probing --no-create-home --shell /usr/sbin/nologin probing-service
groupadd --gid 60772 probing-worker
useradd --system -K SYS_UID_MAX=60999 --uid 60772 --gid 60772 --no-create-home --shell /usr/sbin/nologin probing-worker

# No systemd runs in a container: the package needs only its program that makes users.
needed="python3.11 libbpf1 systemd-standalone-sysusers"
# shellcheck disable=SC2086
dpkg-query --show $needed >/dev/null 2>&1 || {
    apt-get update
    apt-get install -y --no-install-recommends $needed
}
dpkg --install /context/probingd.deb
probingctl --help >/dev/null

rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf /var/cache/ldconfig /var/log/* /tmp/* /usr/share/man /usr/share/locale
find /usr/share/doc -type f ! -name copyright -delete
