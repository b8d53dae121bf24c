#!/bin/sh
# Builds the image of probingd as an OCI archive without a registry: image.sh archive|context [DEB].
#
# `archive` makes .build/image/probingd-VERSION.oci.tar: a minimal Debian by debootstrap, then the Containerfile, both by
# buildah, as root. The Debian is made once and kept in the user's cache: remove ~/.cache/probingd/containers for a newer
# one. `context` makes only .build/image/context, for people with a registry: see Containerfile.
set -eu
umask 022

root=$(cd "$(dirname "$0")/../.." && pwd -P)
out=$root/.build/image
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
deb=${2:-$root/.build/packages/probingd_${version}_$(dpkg --print-architecture).deb}
# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
storage=${XDG_CACHE_HOME:-$HOME/.cache}/probingd/containers
base=localhost/probingd-base:$suite
image=localhost/probingd:$version

# Keeps the images apart from the user's images. chroot: the build needs no control groups and no network of its own.
buildah() { command buildah --root "$storage/root" --runroot "$storage/run" "$@"; }

context() {
    [ -e "$deb" ] || { printf 'error: there is no %s\nhint: make deb\n' "$deb" >&2 && exit 1; }
    rm -rf "$out/context"
    mkdir -p "$out/context"
    cp "$root/packaging/container/Containerfile" "$root/packaging/container/install.sh" "$out/context"
    cp "$deb" "$out/context/probingd.deb"
}

make_base() {
    container=$(buildah from scratch)
    trap 'buildah rm "$container" >/dev/null' EXIT
    debootstrap --variant=minbase --include=python3.11,libbpf1,systemd-standalone-sysusers \
        "$suite" "$(buildah mount "$container")" >"$out/base.log" || {
        tail "$out/base.log" >&2
        exit 1
    }
    buildah commit --quiet --rm "$container" "$base" >/dev/null
    trap - EXIT
}

archive() {
    context
    buildah inspect --type image "$base" >/dev/null 2>&1 || make_base
    buildah build --quiet --isolation chroot --pull-never --build-arg "BASE=$base" --tag "$image" \
        --label org.opencontainers.image.title=probingd --label "org.opencontainers.image.version=$version" \
        --label org.opencontainers.image.licenses=Apache-2.0 "$out/context" >/dev/null
    # Removes the images that had the tag before.
    buildah rmi --prune >/dev/null
    archive=$out/probingd-$version.oci.tar
    rm -f "$archive"
    buildah push --quiet "$image" "oci-archive:$archive:probingd:$version"
    echo "$archive"
}

case "${1:-}" in
archive | context) "$1" ;;
*)
    printf 'error: image.sh takes archive or context\nhint: make image\n' >&2
    exit 2
    ;;
esac
