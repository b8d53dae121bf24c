#!/bin/sh
# Builds .build/wheels/probingd-VERSION-py3-none-PLATFORM.whl: wheel.sh [x86_64|aarch64], by default for this machine.
#
# The wheel holds the BPF objects, which serve both machines, and a libbpf.so.1 for hosts without it
# (daemon/bpf/library.py). libbpf, and the needed parts of elfutils and zlib, are compiled from Debian's sources against
# glibc 2.28, like the wheels of our dependencies; the result needs only glibc. No root is needed. Quick the second
# time; for newer sources, remove .build/libbpf.
set -eu
umask 022

root=$(cd "$(dirname "$0")/.." && pwd -P)
machine=${1:-$(uname -m)}
glibc=2.28
platform=manylinux_$(echo "$glibc" | tr . _)_$machine
suite=trixie
sources=$root/.build/libbpf/sources
libbpf=$root/.build/libbpf/$machine
tools=$root/.build/wheel-tools
out=$root/.build/wheels

die() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

case "$machine" in
x86_64 | aarch64) ;;
*) die "no wheel for $machine" "wheel.sh takes x86_64 or aarch64" ;;
esac

# zig has the compiler, and the headers and symbols of each glibc for each machine.
make_tools() {
    [ ! -x "$tools/bin/auditwheel" ] || return 0
    /usr/bin/python3 -m venv "$tools"
    "$tools/bin/python" -m pip install -q --disable-pip-version-check 'ziglang==0.17.*' 'auditwheel==6.*'
    for tool in cc ar ranlib; do
        printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$tools/bin/python" "$tool" >"$tools/bin/zig-$tool"
        chmod 755 "$tools/bin/zig-$tool"
    done
}

get_sources() {
    [ ! -e "$sources/made" ] || return 0
    command -v bzip2 >/dev/null || die "bzip2 is missing" "apt-get install bzip2"
    rm -rf "$sources"
    mkdir -p "$sources"
    # The released archives, as Debian signed them.
    (cd "$sources" && "$root/packaging/dev/debian.sh" "$sources/apt" "$suite" amd64 source --download-only --tar-only libbpf elfutils zlib)
    for archive in "$sources"/*.orig.tar.*; do tar -xf "$archive" -C "$sources"; done
    rm -rf "$sources/apt"
    touch "$sources/made"
}

# Into $libbpf, with the licenses.
make_libbpf() {
    [ ! -e "$libbpf/libbpf.so.1" ] || return 0
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    bpf=$(echo "$sources"/libbpf-*) elf=$(echo "$sources"/elfutils-*) zlib=$(echo "$sources"/zlib-*)
    export PATH="$tools/bin:$PATH" CC="zig-cc -target $machine-linux-gnu.$glibc" AR=zig-ar RANLIB=zig-ranlib CFLAGS="-O2 -fPIC -w"
    headers="-I$zlib -I$work/zlib"
    mkdir "$work/zlib" "$work/elf" "$work/bpf"
    (cd "$work/zlib" && CHOST="$machine-linux-gnu" "$zlib/configure" --static && make -s libz.a) >"$work/log" 2>&1 ||
        failed zlib
    (
        cd "$work/elf"
        "$elf/configure" --host="$machine-linux-gnu" --disable-debuginfod --disable-libdebuginfod --disable-nls --disable-demangler \
            --disable-symbol-versioning --without-bzlib --without-lzma --without-zstd \
            CXX=false CPPFLAGS="$headers" LDFLAGS="-L$work/zlib" && make -s -C lib && make -s -C libelf libelf.a
    ) >"$work/log" 2>&1 || failed elfutils
    (
        cd "$work/bpf" && $CC $CFLAGS -D_LARGEFILE64_SOURCE -D_FILE_OFFSET_BITS=64 -I"$bpf/include" -I"$bpf/include/uapi" \
            -I"$elf/libelf" $headers -c "$bpf"/src/*.c && $CC -shared -s -o libbpf.so.1 ./*.o -Wl,--version-script="$bpf/src/libbpf.map" -Wl,-soname,libbpf.so.1 \
            -Wl,-z,relro -Wl,-z,now -Wl,--gc-sections "$work/elf/libelf/libelf.a" "$work/elf/lib/libeu.a" "$work/zlib/libz.a"
    ) >"$work/log" 2>&1 || failed libbpf
    mkdir -p "$libbpf"
    cp "$bpf/LICENSE.LGPL-2.1" "$bpf/LICENSE.BSD-2-Clause" "$elf/COPYING-GPLV2" "$elf/COPYING-LGPLV3" "$libbpf"
    cp "$zlib/LICENSE" "$libbpf/LICENSE.zlib"
    cat >"$libbpf/README" <<EOF
libbpf.so.1 is $(basename "$bpf") (LGPL-2.1 or BSD-2-Clause) with libelf of $(basename "$elf") (LGPL-3.0-or-later or
GPL-2.0-or-later) and $(basename "$zlib") (Zlib), unchanged, from Debian's source packages of these names. The program
packaging/wheel.sh of probingd's sources builds it; it may be replaced by any libbpf 1.x.
EOF
    cp "$work/bpf/libbpf.so.1" "$libbpf"
}

failed() {
    tail -n 20 "$work/log" >&2
    die "$1 does not compile for $machine" "remove .build/libbpf and .build/wheel-tools, and run this again"
}

# Copies only the checkout's own files: leftovers of an older build must not get into the wheel.
make_wheel() {
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    (cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents -t "$tree" 2>/dev/null) || true
    mkdir -p "$out"
    rm -f "$out"/probingd-*-"$platform".whl
    PROBINGD_BUNDLED=$libbpf PROBINGD_PLATFORM=$platform \
        "$tools/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$out" "$tree"
    wheel=$(echo "$out"/probingd-*-"$platform".whl)
    # The wheel must run on the platform that its name promises.
    "$tools/bin/auditwheel" show "$wheel" >"$tree/audit" 2>&1 || true
    grep -q "\"$platform\"" "$tree/audit" || {
        cat "$tree/audit" >&2
        die "$wheel needs more than its name says" "look for the newest symbol of glibc above"
    }
    ls -sh "$wheel"
}

make_tools
get_sources
make_libbpf
make_wheel
