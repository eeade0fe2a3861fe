#!/usr/bin/env bash
# A real SLURM with one node on loopback, for tests. Run as root.
#
#   tests/cluster/slurm.sh start [CPUS]    CPUS are declared, not counted (default 8): srun -n 4 works on 2 cores
#   tests/cluster/slurm.sh stop
#
# All its files (keys, sockets, configs, logs, process ids) lie in one folder, SLURM_TEST_DIR, and its two ports, from
# SLURM_TEST_PORT on, are not SLURM's usual ones, so neither /etc nor a cluster that this machine belongs to is
# touched, and several can stand side by side. Clients find it by
#   export SLURM_CONF=/run/project-slurm/slurm.conf
# There is no accounting database: sacct answers with an error.
set -euo pipefail

state=${SLURM_TEST_DIR:-/run/project-slurm}
port=${SLURM_TEST_PORT:-16817}
export SLURM_CONF=$state/slurm.conf
daemons=(slurmd slurmctld munged) # in the order in which they stop

fail() {
  echo "slurm.sh: $*" >&2
  exit 1
}

# The process id that a daemon of ours wrote, if it still is that daemon, alive, and not a later process of the
# same id. (A zombie has no exe.)
pid_of() {
  local pid
  pid=$(cat "$state/$1.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] &&
    readlink "/proc/$pid/exe" >/dev/null && echo "$pid"
}

wait_until() { # wait_until SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.1
  done
}

node_is_up() { sinfo --noheader --format=%T 2>/dev/null | grep -Eqx 'idle|mixed|allocated'; }
queue_is_empty() { [ -z "$(squeue --noheader 2>/dev/null)" ]; }
answers() { scontrol ping 2>/dev/null | grep -q 'is UP'; }
has_ended() { ! pid_of "$1" >/dev/null; }

start() {
  local cpus=$1 host memory_mb
  [ "$(id -u)" = 0 ] || fail "SLURM's daemons need root, and this is $(id -un)."
  for program in munged slurmctld slurmd srun; do
    command -v $program >/dev/null || fail "$program is missing. Install it with: apt-get install slurm-wlm munge"
  done
  for daemon in "${daemons[@]}"; do
    if pid_of "$daemon" >/dev/null; then fail "$daemon runs already, as process $(pid_of "$daemon"). End it with: $0 stop"; fi
  done

  rm -rf "$state"
  mkdir -p "$state"/{munge,controller,node}
  chmod 755 "$state" "$state/munge"
  host=$(hostname -s)
  memory_mb=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.8)}' /proc/meminfo)

  # config_overrides: trust the declared CPUs. linuxproc and task/none: no cgroups, which containers lack.
  # JobRequeue and ReturnToService: preempted jobs come back, and so does the node after a restart.
  # KillWait, UnkillableStepTimeout: a node is free again some seconds after its job was killed, not a minute.
  # sched_interval: a batch job starts after 1 s, not 3 (the cluster's first job: 3 s).
  cat >"$SLURM_CONF" <<CONF
ClusterName=project
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/node
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=sched_interval=1
JobRequeue=1
KillWait=2
UnkillableStepTimeout=10
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory_mb State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF

  (umask 077 && head -c 128 /dev/urandom >"$state/munge/key")
  munged --key-file="$state/munge/key" --socket="$state/munge/socket" --pid-file="$state/munged.pid" \
    --log-file="$state/munge/log" --seed-file="$state/munge/seed"
  slurmctld -f "$SLURM_CONF"
  wait_until 20 answers || fail "slurmctld gives no answer; see $state/slurmctld.log"
  slurmd -f "$SLURM_CONF"
  wait_until 30 node_is_up || fail "the node does not come up; see $state/slurmd.log"
  echo "SLURM_CONF=$SLURM_CONF"
}

stop() {
  # Jobs first: their steps outlive slurmd. All jobs of this cluster are the tests'.
  if pid_of slurmctld >/dev/null && answers; then
    scancel --user=root 2>/dev/null || true
    wait_until 10 queue_is_empty || scancel --signal=KILL --full --user=root 2>/dev/null || true
    wait_until 10 queue_is_empty || echo "slurm.sh: jobs remain: $(squeue --noheader | xargs)" >&2
  fi
  for daemon in "${daemons[@]}"; do
    local pid
    if pid=$(pid_of "$daemon"); then
      kill "$pid"
      wait_until 10 has_ended "$daemon" || kill -KILL "$pid"
    fi
    rm -f "$state/$daemon.pid"
  done
}

case ${1:-} in
  start) start "${2:-8}" ;;
  stop) stop ;;
  *) fail "say 'start [CPUS]' or 'stop', not '${1:-}'." ;;
esac
