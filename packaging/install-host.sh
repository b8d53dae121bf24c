#!/bin/sh
# Installs probingd on this host, or into DESTDIR for an image: install-host.sh install|uninstall.
#
# PREFIX (/opt/probingd) gets a Python environment of its own, BIN (/usr/local/bin) both commands, /usr/lib the units,
# their generator, sysusers.d and tmpfiles.d, /usr/share the completions and man pages, /etc/probingd a configuration, which is never
# overwritten. Without DESTDIR the users are created and systemd reads the units; nothing is started. PYTHON is the
# interpreter to build with, /usr/bin/python3.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd -P)
prefix=${PREFIX:-/opt/probingd}
dest=${DESTDIR:-}
bin=${BIN:-/usr/local/bin}
# The path has the version, because the next Python of the host cannot run packages that were installed for this one.
python=$(readlink -f "${PYTHON:-/usr/bin/python3}")
systemd=$(find "$root/packaging/systemd" -maxdepth 1 -name 'probing*' -printf '%f ')
of_users=probing-worker.service

say() { echo "install-host: $*"; }

die() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

# Prints each completion with its path below /usr/share, where its shell looks for it.
completions() {
    echo probingctl.bash bash-completion/completions/probingctl
    echo _probingctl zsh/vendor-completions/_probingctl
    echo probingctl.fish fish/vendor_completions.d/probingctl.fish
}

man_pages="man1/probingctl.1 man5/probingd.toml.5 man8/probingd.8"

[ -w "${dest:-/}" ] || [ ! -e "${dest:-/}" ] || die "may not write to ${dest:-/}" "run this as root, or name another DESTDIR"

install_all() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is too old" "name Python 3.10 or newer as PYTHON"
    # The directory must be readable for all: each process of the daemon runs as a user of its own.
    umask 022
    mkdir -p "$dest$prefix"
    # setuptools keeps the modules of earlier builds there, and would install them.
    rm -rf "$root/build"
    "$python" -m venv "$dest$prefix"
    "$dest$prefix/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$root/packaging/constraints.txt" "$root"
    # In an image, files of pip contain the path below DESTDIR, which is wrong once the image runs.
    [ -z "$dest" ] || grep -rlI -- "$dest$prefix" "$dest$prefix/bin" "$dest$prefix/pyvenv.cfg" | while read -r file; do
        sed -i "s#$dest$prefix#$prefix#g" "$file"
    done
    install -D -m 644 -t "$dest$prefix/share/doc/probingd" "$root/README.md" "$root"/docs/*.md
    install -D -m 755 -t "$dest$prefix/share/slurm" "$root"/packaging/slurm/*.sh
    for name in probingd probingctl; do
        mkdir -p "$dest$bin"
        ln -sfn "$prefix/bin/$name" "$dest$bin/$name"
    done
    completions | while read -r source target; do
        install -D -m 644 "$root/packaging/completion/$source" "$dest/usr/share/$target"
    done
    "$dest$prefix/bin/python" -B "$root/packaging/docs/man.py" "$dest/usr/share/man"
    for page in $man_pages; do gzip -9nf "$dest/usr/share/man/$page"; done
    mkdir -p "$dest/usr/lib/systemd/system"
    for unit in $systemd; do
        sed "s#/opt/probingd#$prefix#g" "$root/packaging/systemd/$unit" >"$dest/usr/lib/systemd/system/$unit"
    done
    mkdir -p "$dest/usr/lib/systemd/user"
    sed "s#/opt/probingd#$prefix#g" "$root/packaging/systemd/user/$of_users" >"$dest/usr/lib/systemd/user/$of_users"
    install -D -m 755 -t "$dest/usr/lib/systemd/system-generators" "$root/packaging/generator/probingd"
    install -D -m 644 -t "$dest/usr/lib/sysusers.d" "$root/packaging/sysusers.d/probingd.conf"
    install -D -m 644 -t "$dest/usr/lib/tmpfiles.d" "$root/packaging/tmpfiles.d/probingd.conf"
    [ -e "$dest/etc/probingd/probingd.toml" ] || install -D -m 644 -t "$dest/etc/probingd" "$root/packaging/probingd.toml"
    if [ -z "$dest" ]; then
        systemd-sysusers "$root/packaging/sysusers.d/probingd.conf"
        [ ! -d /run/systemd/system ] || systemctl daemon-reload
    fi
    say "installed into $dest$prefix; start it with \`systemctl start probingd\`, or in an image at its first boot"
    say "users other than root need the group probing to use probingctl: \`usermod -aG probing USER\`"
}

uninstall_all() {
    if [ -z "$dest" ] && [ -d /run/systemd/system ]; then
        systemctl disable --quiet --now probingd.service probing-web.service 2>/dev/null || true
    fi
    for unit in $systemd; do rm -f "$dest/usr/lib/systemd/system/$unit"; done
    rm -f "$dest/usr/lib/systemd/user/$of_users"
    rm -f "$dest/usr/lib/systemd/system-generators/probingd" "$dest/usr/lib/sysusers.d/probingd.conf" "$dest/usr/lib/tmpfiles.d/probingd.conf"
    for name in probingd probingctl; do
        [ "$(readlink "$dest$bin/$name" || true)" != "$prefix/bin/$name" ] || rm "$dest$bin/$name"
    done
    completions | while read -r _ target; do rm -f "$dest/usr/share/$target"; done
    for page in $man_pages; do rm -f "$dest/usr/share/man/$page.gz"; done
    # Removes only an environment that this script made.
    [ ! -e "$dest$prefix/pyvenv.cfg" ] || rm -rf "$dest${prefix:?}"
    [ -n "$dest" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload
    say "removed; rows, configuration and users stay: /var/lib/probingd, /etc/probingd, the users probing, probing-service and probing-worker"
}

case "${1:-}" in
install) install_all ;;
uninstall) uninstall_all ;;
*) die "install-host.sh takes install or uninstall" "make install-host" ;;
esac
