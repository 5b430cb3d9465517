"""A run as Slurm job scripts: a gang for the learner, an array for each of the other roles, and a script that submits.

The run directory is on a file system that all nodes have, as clusters with Slurm do. A job that is preempted is queued
again by Slurm, one whose role failed by its script; the run goes on from checkpoint and ledger.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode
from streamrl.learner.ending import FINISHED_FILE
from streamrl.runtime.placement.rendered import SHARED_SETTINGS, drain_seconds, expect_portable, lead
from streamrl.runtime.plan import processes, threads

_KEPT: Final = "slurm"
"""Folder of the run directory: `over` says that the run has ended, `ROLE-N.crashes` has a line for each failure."""
_REQUEUE: Final = 'scontrol requeue "$SLURM_JOB_ID"'
_STOPPED: Final = f"{int(ExitCode.TERMINATED)}|{int(ExitCode.INTERRUPTED)}"
"""Exit codes of a learner that was stopped before the run was finished."""
_HOPELESS: Final = "|".join(str(int(code)) for code in (ExitCode.CONFIG, ExitCode.CANNOT_CREATE, ExitCode.USAGE))
"""Exit codes of roles that another start would not fix."""


def render(
    config: RunConfig, run_file: Path, run_dir: Path, overrides: Sequence[str] = (), given: Collection[str] = ()
) -> dict[str, str]:
    """Scripts by name; `overrides` are those of `--set`, with which `config` was read; `given` are keys that it sets.

    The paths are seen from the folder of the scripts: `submit.sh` goes there, and a job works where it was submitted.

    ConfigError: the run has no Redis that all nodes reach, or its roles must share a host.
    """
    expect_portable(config, "Slurm")
    if config.redis.url is None:
        raise ConfigError(
            "the run's own Redis is reached on one node only", "set redis.url to a Redis that all nodes reach"
        )
    if config.reward_servers:
        raise ConfigError(
            f"reward models {', '.join(config.reward_servers)} are served by streamrl itself on one host",
            "serve them in jobs of their own, and set reward_models.NAME.url",
        )
    counts = processes(config)
    files = {f"{kind}.sbatch": _array(config, kind, count, run_dir) for kind, count in counts.items()}
    shared = [f"{key}={value}" for key, value in SHARED_SETTINGS.items() if key not in given]
    settings = " ".join(f"--set {shlex.quote(item)}" for item in (*shared, *overrides))
    leader = lead(config)
    files[f"{leader}.sbatch"] = _leader(config, counts[leader], run_dir)
    return {**files, "submit.sh": _submit(config, list(counts), run_file, run_dir, settings)}


def _head(config: RunConfig, kind: str, run_dir: Path, *more: str) -> list[str]:
    wanted = config.resources(kind)
    options = [
        f"--job-name={_job(config, kind)}",
        f"--output={run_dir}/logs/slurm-{kind}-%j.log",
        "--open-mode=append",
        "--requeue",
        # SIGTERM to the roles this long before the end: they drain.
        f"--signal=TERM@{drain_seconds(config)}",
        *([f"--cpus-per-task={max(1, round(wanted.cpus))}"] if wanted.cpus else []),
        *([f"--gpus-per-task={wanted.gpus:g}"] if wanted.gpus else []),
        *more,
    ]
    return ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), "set -uo pipefail"]


def _job(config: RunConfig, kind: str) -> str:
    return f"streamrl-{config.name}-{kind}"


def _exports(config: RunConfig, kind: str) -> list[str]:
    env = threads(config, kind, cluster=True)
    if config.redis.password_file is not None:
        env["STREAMRL_REDIS__PASSWORD_FILE"] = str(config.redis.password_file)
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def _begin(run_dir: Path, kind: str, task: str = "0") -> list[str]:
    """Where a job keeps what outlives it; one that waited until the run was over does nothing."""
    kept = shlex.quote(str(run_dir / _KEPT))
    return [f"over={kept}/over crashes={kept}/{kind}-{task}.crashes", '[ ! -e "$over" ] || exit 0']


def _crashed(config: RunConfig, otherwise: str) -> list[str]:
    """A role that failed is queued again as often as a supervisor restarts it; preemptions do not count."""
    return [
        "    *)",
        '        echo "$SLURM_JOB_ID ended with $code" >> "$crashes"',
        f'        if [ "$(wc -l < "$crashes")" -le {config.supervisor.max_restarts} ]; then',
        f"            {_REQUEUE}",
        "            exit 0",
        "        fi",
        *([f"        {otherwise}"] if otherwise else []),
        "        ;;",
        "esac",
    ]


def _array(config: RunConfig, kind: str, count: int, run_dir: Path) -> str:
    run = f"srun --export=ALL streamrl run {kind} --run {shlex.quote(str(run_dir))}"
    lines = [
        *_head(config, kind, run_dir, f"--array=0-{count - 1}", "--ntasks=1"),
        *_exports(config, kind),
        *_begin(run_dir, kind, '"$SLURM_ARRAY_TASK_ID"'),
        f'{run} --index "$SLURM_ARRAY_TASK_ID"',
        "code=$?",
        '[ ! -e "$over" ] || exit 0',
        'case "$code" in',
        f'    {_HOPELESS}) exit "$code" ;;  # another start would not fix it',
        f"    0) {_REQUEUE} ;;  # it drained, because the node was wanted for something else",
        *_crashed(config, 'exit "$code"'),
    ]
    return "\n".join(lines) + "\n"


def _leader(config: RunConfig, ranks: int, run_dir: Path) -> str:
    """All ranks of a learner are tasks of one job: Slurm starts all or none, and ends all when one fails."""
    kind = lead(config)
    role = f"exec streamrl run {kind} --run {shlex.quote(str(run_dir))} --index $SLURM_PROCID --until-finished"
    others = ",".join(_job(config, other) for other in processes(config) if other != kind)
    lines = [
        *_head(config, kind, run_dir, f"--ntasks={ranks}"),
        *_exports(config, kind),
        *_begin(run_dir, kind),
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# A port of its own for each start: ranks of an earlier one may still hold the last.",
        "port=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 20000))",
        f'export STREAMRL_RENDEZVOUS="tcp://$first:$port" WORLD_SIZE={ranks}',
        "# shellcheck disable=SC2016  # expanded by each task",
        f"srun --export=ALL --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 {role}'",
        "code=$?",
        'case "$code" in',
        f"    0) [ -e {shlex.quote(str(run_dir / FINISHED_FILE))} ] || exit 0 ;;  # a newer one took over",
        f"    {_STOPPED}) {_REQUEUE}; exit 0 ;;  # it drained, because the node was wanted for something else",
        f"    {_HOPELESS}) ;;  # another start would not fix it",
        *_crashed(config, ""),
        "# The run is over, or cannot go on: other roles drain, and those that wait for a node never start.",
        'touch "$over"',
        f"scancel --me --state=PENDING --name={others}",
        f"scancel --me --signal=TERM --name={others}",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _submit(config: RunConfig, kinds: Sequence[str], run_file: Path, run_dir: Path, settings: str) -> str:
    jobs, kept = ",".join(_job(config, kind) for kind in kinds), shlex.quote(str(run_dir / _KEPT))
    lines = [
        "#!/usr/bin/env bash",
        "# Checks the run, and submits its jobs. A repeat after the end goes on with the run.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        f"queued=$(squeue --me --noheader --format=%i --name={jobs})",
        'if [ -n "$queued" ]; then',
        f'    echo "error: jobs of this run are queued already: squeue --me --name={jobs}" >&2',
        f"    exit {int(ExitCode.CONFIG)}",
        "fi",
        f"streamrl up {shlex.quote(str(run_file))} --run {shlex.quote(str(run_dir))} --prepare {settings}".rstrip(),
        f"rm -rf {kept}",
        f"mkdir {kept}",
        *(f"sbatch --parsable {kind}.sbatch" for kind in kinds),
        f'echo "streamrl status --run $(realpath {shlex.quote(str(run_dir))})   shows the roles"',
        f"echo 'scancel --me --name={jobs}   ends them'",
    ]
    return "\n".join(lines) + "\n"
