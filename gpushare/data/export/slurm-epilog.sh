#!/bin/sh
# Written by gpushare: Epilog of slurmd. Ends the MPS daemon of a GPU with the last job that used it.
@{COMMON}
status=0
for home in "$state"/GPU-*; do
    [ -e "$home/jobs/$SLURM_JOB_ID" ] || continue
    rm -f "$home/jobs/$SLURM_JOB_ID"
    if [ -n "$(ls -A "$home/jobs")" ]; then
        let_in || status=1
    else
        stop_daemon || status=1
    fi
done
rm -f "$state/job-$SLURM_JOB_ID"
exit $status
