#!/bin/sh
# Epilog of Slurm (`Epilog=` in slurm.conf): keeps what probingd has diagnosed of the job that ends on this node.
#
# DIRECTORY/JOB.txt is the answer for people, with the findings of all nodes while it ran; JOB.facts are the facts of this
# node: `probingctl diagnose --facts` answers from them again.
# It ends with 0 whatever probingd does, so that no node is drained for its watcher. /etc/default/probingd-slurm may set
# the variables below, and replace `say`.
set -u
umask 027

probingctl=/opt/probingd/bin/probingctl
directory=/var/log/probingd/jobs
# Seconds for each of its two questions.
limit_s=20
# Days to keep answers.
keep_days=30
say() { logger -t probingd-epilog -- "$1" 2>/dev/null || echo "probingd-epilog: $1" >&2; }
settings=${PROBINGD_SLURM_SETTINGS:-/etc/default/probingd-slurm}
# shellcheck source=/dev/null
[ ! -r "$settings" ] || . "$settings"

# It becomes the name of a file.
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
[ -x "$probingctl" ] || exit 0
mkdir -p "$directory" 2>/dev/null
if ! partial=$(mktemp -d "$directory/.$SLURM_JOB_ID.XXXXXX" 2>/dev/null); then
    say "job $SLURM_JOB_ID: cannot write to $directory"
    exit 0
fi
trap 'rm -rf "$partial"' EXIT
trap 'exit 0' TERM

kept=no
timeout --kill-after=1 "$limit_s" "$probingctl" diagnose --job "$SLURM_JOB_ID" --save "$partial/facts" \
    </dev/null >"$partial/txt" 2>"$partial/errors"
case $? in
0 | 4) kept=yes ;;
3)
    kept=yes
    say "job $SLURM_JOB_ID: $(head -n 1 "$partial/txt")"
    ;;
124 | 137) say "job $SLURM_JOB_ID: no diagnosis within $limit_s s" ;;
# A job that trained nothing is not known.
*) say "job $SLURM_JOB_ID: no diagnosis: $(head -n 1 "$partial/errors")" ;;
esac
if [ "$kept" = yes ]; then
    {
        echo
        timeout --kill-after=1 "$limit_s" "$probingctl" diagnose --history --job "$SLURM_JOB_ID" </dev/null 2>&1
    } >>"$partial/txt"
    for kind in facts txt; do mv -f "$partial/$kind" "$directory/$SLURM_JOB_ID.$kind"; done
fi
timeout 5 find "$directory" -maxdepth 1 -type f \( -name '*.facts' -o -name '*.txt' \) -mtime "+$keep_days" -delete
exit 0
