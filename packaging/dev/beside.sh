#!/bin/sh
# Runs two commands, `beside.sh FIRST SECOND`: the second command in the CPU time that the first one leaves. The output
# of the second command comes at the end. Fails if either command fails.
set -eu
output=$(mktemp)
# The kernel shares the CPU time between sessions first: a session of its own has a weight of its own.
# shellcheck disable=SC2016
setsid -w sh -c 'echo 19 >"/proc/$$/autogroup" || true; exec nice -n 19 sh -c "$1"' sh "$2" >"$output" 2>&1 &
second=$!
trap 'rm -f "$output"' EXIT
trap 'kill -- "-$second"; exit 130' INT TERM
failed=0
sh -c "$1" || failed=$?
wait "$second" || failed=$?
cat "$output"
exit "$failed"
