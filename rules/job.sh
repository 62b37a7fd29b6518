# What the shell of each job begins with; rules/common.smk has told it SCRIPTS and PYTHON.

# Snakemake's own settings, which a prefix replaces.
set -euo pipefail
trap '[ $? != 137 ] || echo "killed by signal 9, most often for want of memory: lower \
extract.max_num_seqs or kv_cache_gib" >&2' EXIT

# Ends the job's processes with it and with Snakemake.
"$PYTHON" -SE "$SCRIPTS/eyrie/jobs.py" $$ $PPID &
export EYRIE_JOB=$$:$PPID

# speculators tells by loguru of each weight that it looks for.
export LOGURU_LEVEL=ERROR
# Huge pages make a CPU's products 5 to 8% faster.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
# `python` is the one that runs Snakemake.
export PATH=${PYTHON%/*}:$PATH
