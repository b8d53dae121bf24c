#!/usr/bin/env bash
# Starts a daemon, runs a real training that is not aware of it, shows the daemon's findings, and removes everything.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
base=$(mktemp -d /tmp/probingd-demo-XXXXXX)
chmod 755 "$base"
job=0
daemon=0

finish() {
    status=$?
    trap - EXIT INT TERM
    # The launcher passes the signal on to its ranks.
    if [ "$job" != 0 ]; then kill "$job" 2>/dev/null || true; wait "$job" 2>/dev/null || true; fi
    if [ "$daemon" != 0 ]; then kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; fi
    [ "$status" = 0 ] || cat "$base/daemon.log" "$base/job.log" >&2 || true
    rm -rf "$base"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

show() {
    printf '\n$ probingctl'
    for word in "$@"; do
        case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$bin/probingctl" -t "unix:$base/p.sock" "$@"
}

wait_for() {
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    echo "not there after a minute: $*" >&2
    exit 1
}

echo "A training of two ranks starts; it is not aware of probingd."
OMP_NUM_THREADS=1 "$bin/torchrun" --nproc-per-node 2 --master-port "$((20000 + $$ % 10000))" \
    examples/train_ddp.py --steps 1000000 --delay-ms 20 >"$base/job.log" 2>&1 &
job=$!

echo "The daemon starts, on its own socket and state directory."
mkfifo "$base/ready"
"$bin/probingd" run --socket "$base/p.sock" --state-dir "$base/state" --instance "demo-$$" \
    >"$base/ready" 2>"$base/daemon.log" &
daemon=$!
# Ends with the word, or with the daemon.
read -r word <"$base/ready" || { echo "the daemon did not start" >&2; exit 1; }
[ "$word" = ready ]

seen() {
    [ "$("$bin/probingctl" -t "unix:$base/p.sock" -f csv query \
        "SELECT count(DISTINCT rank) AS n FROM comm.ops WHERE op = 'all_reduce' HAVING count(*) > 200" | tail -n 1)" = 2 ]
}
wait_for seen

show ps
show nccl
show stacks
show query "SELECT rank, op, count(*) AS calls, avg(duration_ns) / 1e6 AS avg_ms
    FROM comm.ops GROUP BY rank, op ORDER BY rank, op"

printf '\nThe training goes on; the daemon takes its probes away and ends.\n'
kill -0 "$job"
