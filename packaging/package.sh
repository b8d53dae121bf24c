#!/bin/sh
# Builds a package into .build/packages: package.sh deb|rpm [TREE].
#
# TREE is an image into which install-host.sh has installed; without TREE it is made. The package needs the Python with
# which the tree was made (PYTHON, else /usr/bin/python3), as its virtual environment refers to it. VERSION replaces the
# version, for tests of upgrades, OUT the directory, and COMPRESSION the compression of a deb that is unpacked at once.
set -eu
umask 022

root=$(cd "$(dirname "$0")/.." && pwd -P)
kind=${1:-}
out=${OUT:-$root/.build/packages}
tree=${2:-$out/tree}
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")}
summary=$(sed -n 's/^description = "\(.*\)"/\1/p' "$root/pyproject.toml")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

if [ $# -lt 2 ]; then
    rm -rf "$tree"
    DESTDIR=$tree BIN=/usr/bin "$root/packaging/install-host.sh" install
fi
python=$(readlink -f "$tree"/opt/*/bin/python)

# The content of the package: the tree without files that only compilers and tests of other projects need.
content=$work/content
cp -a "$tree" "$content"
site=$(echo "$content"/opt/*/lib/python3*/site-packages)
rm -rf "$content"/opt/*/include "$content"/opt/*/bin/pip* "$site"/pip "$site"/pip-* "$site"/setuptools* \
    "$site"/pkg_resources "$site"/_distutils_hack "$site"/distutils-precedence.pth "$site"/pyarrow/include "$site"/pyarrow/tests "$site"/pyarrow/src
find "$site/numpy" -type d -name tests -prune -exec rm -rf {} +
find "$site" -name '*.a' -delete

# A maintainer script: the shared steps, and the commands that choose among them, from standard input.
script() {
    { printf '#!/bin/sh\nset -e\n'; cat "$root/packaging/package/steps.sh" -; } >"$1"
    chmod 755 "$1"
}

deb() {
    architecture=$(dpkg --print-architecture)
    mkdir "$content/DEBIAN"
    cat >"$content/DEBIAN/control" <<EOF
Package: probingd
Version: $version
Architecture: $architecture
Maintainer: The developers of probingd <probingd@localhost>
Installed-Size: $(du -sk "$content" | cut -f1)
Depends: $(basename "$python"), libbpf1, util-linux, systemd | systemd-standalone-sysusers
Section: admin
Priority: optional
Description: $summary
 One daemon on each node watches every training process by eBPF and /proc:
 which rank is in which collective, for how long, and the line of Python
 that it executes. probingctl asks one node or all of them.
EOF
    echo /etc/probingd/probingd.toml >"$content/DEBIAN/conffiles"
    script "$content/DEBIAN/postinst" <<'EOF'
if [ "$1" = configure ]; then installed; fi
EOF
    script "$content/DEBIAN/prerm" <<'EOF'
if [ "$1" = remove ]; then removing; fi
EOF
    script "$content/DEBIAN/postrm" <<'EOF'
case "$1" in
remove) removed ;;
purge) purged ;;
esac
EOF
    dpkg-deb --root-owner-group "-Z${COMPRESSION:-zstd}" -z6 --build "$content" "$out/probingd_${version}_$architecture.deb"
}

rpm() {
    cat >"$work/probingd.spec" <<EOF
%global __os_install_post %{nil}
%global _build_id_links none
%global _binary_payload w3.zstdio
Name: probingd
Version: $version
Release: 1
Summary: $summary
License: Apache-2.0
AutoReqProv: no
Requires: $python, libbpf, util-linux, systemd
%description
One daemon on each node watches every training process by eBPF and /proc.
%install
cp -a "$content/." "%{buildroot}"
%files
%defattr(-,root,root)
$(cd "$content" && find opt etc/probingd -type d -printf '%%dir "/%p"\n')
$(cd "$content" && find . ! -type d ! -path ./etc/probingd/probingd.toml -printf '"/%P"\n')
%config(noreplace) /etc/probingd/probingd.toml
%post
$(cat "$root/packaging/package/steps.sh")
installed
%preun
$(cat "$root/packaging/package/steps.sh")
if [ "\$1" = 0 ]; then removing; fi
%postun
$(cat "$root/packaging/package/steps.sh")
if [ "\$1" = 0 ]; then removed; fi
EOF
    rpmbuild -bb --quiet --define "_topdir $work/rpm" --define "_rpmdir $out" \
        --define '_rpmfilename %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm' "$work/probingd.spec"
}

case "$kind" in
deb | rpm) "$kind" ;;
*)
    printf 'error: package.sh takes deb or rpm\nhint: make deb\n' >&2
    exit 2
    ;;
esac
