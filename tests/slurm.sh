#!/bin/bash
# A SLURM of two nodes with 8 pretended GPUs each, for tests: slurm.sh up|down FOLDER. Its default
# partition has the first node alone; `both` has two, which are this machine twice.
# It needs no root, munge, systemd or cgroups, and listens on 127.0.0.1 alone. Then take it with
#   export SLURM_CONF=FOLDER/slurm.conf PATH=FOLDER/bin:$PATH
set -euo pipefail
what=$1
mkdir -p "$2"
D=$(realpath "$2")
H=$(hostname -s)

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

up() {
    mkdir -p "$D"/{state,spool,log,gpu,bin}
    : >"$D/plugstack.conf"
    # A GPU is a character device to SLURM.
    for i in {0..7}; do ln -sfn /dev/null "$D/gpu/gpu$i"; done
    # Snakemake's job step drops SLURM_CONF before it calls srun.
    printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$D/slurm.conf" "$(command -v srun)" >"$D/bin/srun"
    chmod +x "$D/bin/srun"
    cat >"$D/gres.conf" <<CONF
AutoDetect=off
NodeName=n[1-2] Name=gpu File=$D/gpu/gpu[0-7]
CONF
    cat >"$D/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$(port)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/%n.log
PlugStackConfig=$D/plugstack.conf
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
DefMemPerCPU=1000
EnforcePartLimits=ALL
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
KillWait=5
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8 State=UNKNOWN
NodeName=n1 NodeHostName=$H NodeAddr=127.0.0.1 Port=$(port)
NodeName=n2 NodeHostName=$H NodeAddr=127.0.0.1 Port=$(port)
PartitionName=gpu Nodes=n1 Default=YES MaxTime=INFINITE State=UP
PartitionName=both Nodes=n[1-2] MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$D/slurm.conf
    slurmctld -c -f "$SLURM_CONF"
    for node in n1 n2; do slurmd -N $node -f "$SLURM_CONF"; done
    for _ in {1..100}; do
        [ "$(timeout 2 sinfo -h -p both -o %D%T 2>/dev/null)" = 2idle ] && return
        sleep .1
    done
    echo "SLURM did not come up:" >&2
    grep -hE 'fatal|error' "$D"/log/*.log | tail -5 >&2
    down
    return 1
}

down() {
    for name in slurmctld n1 n2; do
        pid=$(cat "$D/$name.pid" 2>/dev/null) || continue
        # A daemon that ended leaves its file, and its number may be another process's.
        [[ $(cat "/proc/$pid/comm" 2>/dev/null) = slurm* ]] || continue
        kill "$pid"
        for _ in {1..100}; do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep .1
        done
        kill -9 "$pid"
    done
}

$what
