"""A SLURM cluster on this machine: munged, slurmctld, and a slurmd for each of two nodes.

Invariants: all of it lies below one folder and listens on loopback; only processes that it has
started are ended. The nodes share this host's name, /dev/shm and disk, so levels of each host
cannot be tested with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import statehold
from support.agents import wait_ended, wait_for
from support.faults import must

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
DEADLINE_S = 280.0  # of a job: a busy machine takes a minute to start it
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
GRACE_S = 20  # of a preempted job; KillWait has its default of 30 s
# A requeued job waits as long as credentials live, and a busy machine needs some of that.
CREDENTIALS_S = 8

# The partition "low" makes way for "high". Nodes have more processors than this machine may have.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge,cred_expire={credentials_s}
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType={tracking}
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
ReturnToService=2
KillWait=30
SchedulerParameters=bf_interval=2,batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
PRIVATE_MEMORY = "JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n"


class Cluster:
    """The commands of a cluster that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {
            **os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(statehold.__file__).parents[1]),  # whichever torchrun is found
        }  # fmt: skip

    def tell(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a command of SLURM; what it says."""
        ran = self._ran(*command, cwd=cwd)
        must(ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}")
        return ran.stdout

    def _ran(
        self, *command: str | Path, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command], env=self._environment, cwd=cwd,
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip

    def submit(self, script: Path, *options: str) -> str:
        """The number of a job that runs in the script's folder, and writes to `log` there."""
        output = ("--output", "log", "--parsable")
        return self.tell("sbatch", *output, *options, script, cwd=script.parent).strip()

    def end(self, *job: str) -> None:
        """Kill what is left of a job, or with "--user=root" of all jobs. None starts again."""
        self._ran("scancel", "--signal=KILL", "--full", *job)  # fails if the job has ended
        self._ran("scancel", *job)

    def facts(self, job: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, Restarts, ExitCode and more."""
        told = self.tell("scontrol", "show", "job", job, "--oneliner")
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def ended(self, job: str) -> dict[str, str]:
        """Wait until a job has come to its end, with all restarts; the facts then."""

        def over() -> dict[str, str] | None:
            facts = self.facts(job)
            return facts if facts["JobState"] in ENDED else None

        facts: dict[str, str] = wait_for(over, lambda: f"{self.facts(job)}", DEADLINE_S)
        return facts

    def start(self) -> None:
        """Start all servers; return when all nodes take jobs."""
        folder = self._folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.tell("munged", "--force", f"--socket={folder}/munge", *files)
        configuration = ("-f", folder / "slurm.conf")
        self.tell("slurmctld", "-c", *configuration)
        for node in nodes_of(folder):
            self.tell("slurmd", "-N", node, *configuration)
        idle = ["idle"] * 2
        wait_for(lambda: self.tell("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == idle,
                 "the nodes do not come up")  # fmt: skip

    def stop(self) -> None:
        """End its jobs, then the servers that have started."""
        if (self._folder / "slurmctld.pid").exists():
            self.end("--user=root")
            wait_for(lambda: not self.tell("squeue", "-h"), "jobs go on")
        names = [*(f"slurmd-{node}" for node in nodes_of(self._folder)), "slurmctld", "munge"]
        for name in names:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = int((self._folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                wait_ended(pid)


def nodes_of(folder: Path) -> tuple[str, str]:
    """Their control groups have these names, so other clusters on this machine have others."""
    return f"{folder.name}-1", f"{folder.name}-2"


@contextlib.contextmanager
def running(folder: Path, private_memory: bool = False) -> Iterator[Cluster]:
    """A cluster below an empty folder; `private_memory`: each job has a /dev/shm of its own."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in listeners:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in listeners]
    groups = Path("/sys/fs/cgroup/freezer").is_dir()
    text = CONFIGURATION.format(
        folder=folder, host=socket.gethostname().split(".")[0], ports=ports,
        nodes=nodes_of(folder), tracking="proctrack/cgroup" if groups else "proctrack/linuxproc",
        grace_s=GRACE_S, credentials_s=CREDENTIALS_S,
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text + (PRIVATE_MEMORY if private_memory else ""))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    (folder / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={folder}/jobs\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
