#!/bin/sh
# Runs apt-get on a suite and an architecture that need not be the host's: debian.sh FOLDER SUITE ARCHITECTURE ARGUMENT...
#
# FOLDER gets the lists and packages; nothing of the host changes, and no package counts as installed. The mirror is the
# mirror of this host's own Debian; apt verifies its files.
set -eu

folder=$1 suite=$2 architecture=$3
shift 3
keys=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' | sed -n 's/^Debian|Debian|//p' | head -n 1)
if [ -z "$mirror" ] || [ ! -e "$keys" ]; then
    echo "error: apt has no sources of Debian here, or $keys is missing" >&2
    echo "hint: run apt-get update, and install debian-archive-keyring" >&2
    exit 1
fi
mkdir -p "$folder/lists/partial" "$folder/archives/partial"
for kind in deb deb-src; do
    echo "$kind [arch=$architecture signed-by=$keys] $mirror $suite main"
done >"$folder/sources.list"

elsewhere() {
    apt-get -qq -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$folder/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$folder" \
        -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Sandbox::User= "$@"
}
elsewhere update
elsewhere "$@"
