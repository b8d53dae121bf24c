#!/bin/sh
# Prolog of Slurm (`Prolog=` in slurm.conf): asks probingd whether this node is fit for a job, and logs what is not.
#
# It ends with 0 whatever probingd does: no job fails because its watcher is missing, hangs or cannot tell. Only a check
# that is named in `drain` and finds a fault ends it with 1: slurmd then drains the node and requeues the job.
# /etc/default/probingd-slurm may set the variables below, and replace `say`.
set -u

probingctl=/opt/probingd/bin/probingctl
# health: faults of the hardware, also of the past; preflight: what the node has now (docs/preflight.md).
checks="health preflight"
# Those of them that drain the node: empty for none.
drain=""
# Seconds for one check.
limit_s=10
say() { logger -t probingd-prolog -- "$1" 2>/dev/null || echo "probingd-prolog: $1" >&2; }
settings=${PROBINGD_SLURM_SETTINGS:-/etc/default/probingd-slurm}
# shellcheck source=/dev/null
[ ! -r "$settings" ] || . "$settings"

[ -x "$probingctl" ] || exit 0
bad=""
for check in $checks; do
    # Nothing of it may wait for the job's standard input, nor write a progress line.
    text=$(timeout --kill-after=1 "$limit_s" "$probingctl" "$check" </dev/null 2>&1)
    case $? in
    0) ;;
    3)
        # What is wrong comes first.
        say "job ${SLURM_JOB_ID:-?}: $check finds a fault: $(echo "$text" | head -n 8)"
        case " $drain " in *" $check "*) bad="$bad $check" ;; esac
        ;;
    124 | 137) say "job ${SLURM_JOB_ID:-?}: $check gave no answer within $limit_s s" ;;
    *) say "job ${SLURM_JOB_ID:-?}: $check cannot tell: $text" ;;
    esac
done
[ -z "$bad" ] || exit 1
