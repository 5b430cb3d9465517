#!/usr/bin/env python3
"""What the job scripts ask of Slurm, on this machine: `sbatch`, `srun`, `scontrol`, `squeue` or `scancel`.

Jobs are started at once and queued again when they ask for it. State is in the folder `PLAYED_SLURM`:
`queued-NAME-ID` is there until a job has ended, `job-NAME-ID` has the pid of a running job's step, `requeue-ID` asks
for another start, `log` says what was called. Task 1 of the job named in `full` waits for a node while that is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["PLAYED_SLURM"])


def options_of(script: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE))


def sbatch(arguments: list[str]) -> int:
    script = Path(arguments[-1]).resolve()
    options = options_of(script)
    first, _, last = options.get("array", "0-0").partition("-")
    for task in range(int(first), int(last) + 1):
        number = str(len(list(STATE.glob("submitted-*"))) + 1)
        (STATE / f"submitted-{number}").touch()
        env = {
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NAME": options["job-name"],
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": options.get("ntasks", "1"),
            "SLURM_ARRAY_TASK_ID": str(task),
        }
        with (STATE / f"output-{options['job-name']}-{task}").open("ab") as out:
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "job", str(script)],
                env={**os.environ, **env},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    print(number)
    return 0


def job(arguments: list[str]) -> int:
    """Run a script, and again while it asks for it."""
    again = STATE / f"requeue-{os.environ['SLURM_JOB_ID']}"
    queued = STATE / f"queued-{os.environ['SLURM_JOB_NAME']}-{os.environ['SLURM_JOB_ID']}"
    queued.write_text(os.environ["SLURM_ARRAY_TASK_ID"])
    try:
        while waits(queued):
            time.sleep(0.1)
        return started(arguments[0], again) if queued.exists() else 0
    finally:
        queued.unlink(missing_ok=True)


def waits(queued: Path) -> bool:
    full = STATE / "full"
    return (
        full.exists()
        and queued.exists()
        and queued.read_text() == "1"
        and queued.name.startswith(f"queued-{full.read_text()}-")
    )


def started(script: str, again: Path) -> int:
    for count in range(20):
        code = subprocess.run(
            ["bash", script], env={**os.environ, "SLURM_RESTART_COUNT": str(count)}, check=False
        ).returncode
        if not again.exists():
            return code
        again.unlink()
    raise AssertionError("it is queued again for ever")


def srun(arguments: list[str]) -> int:
    command = [word for word in arguments if not word.startswith("--export") and not word.startswith("--kill")]
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(rank)})
        for rank in range(int(os.environ["SLURM_NTASKS"]))
    ]

    def forward(number: int, _: object) -> None:
        for task in tasks:
            os.kill(task.pid, number)  # `send_signal` would take the exit code, which is waited for below

    signal.signal(signal.SIGTERM, forward)
    step = STATE / f"job-{os.environ['SLURM_JOB_NAME']}-{os.environ['SLURM_JOB_ID']}"
    step.write_text(str(os.getpid()))
    codes = []
    while tasks:
        pid, status = os.wait()
        tasks = [task for task in tasks if task.pid != pid]
        code = os.waitstatus_to_exitcode(status)
        codes.append(code if code >= 0 else 128 - code)
        if code:
            for task in tasks:
                os.kill(task.pid, signal.SIGKILL)
    step.unlink()
    return max(codes)


def scontrol(arguments: list[str]) -> int:
    if arguments[0] == "requeue":
        (STATE / f"requeue-{arguments[1]}").touch()
    else:
        assert arguments == ["show", "hostnames", "localhost"]
        print("localhost")
    return 0


def given_to(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options, and the names of jobs among them."""
    assert arguments[0] == "--me"
    given = {name: value for name, _, value in (word.lstrip("-").partition("=") for word in arguments)}
    return given, given["name"].split(",")


def scancel(arguments: list[str]) -> int:
    given, names = given_to(arguments)
    for name in names:
        if given.get("state") == "PENDING":
            for queued in STATE.glob(f"queued-{name}-*"):
                if waits(queued):
                    queued.unlink()
            continue
        for step in STATE.glob(f"job-{name}-*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(step.read_text()), getattr(signal, f"SIG{given['signal']}"))
    return 0


def squeue(arguments: list[str]) -> int:
    _, names = given_to(arguments)
    for name in names:
        for queued in STATE.glob(f"queued-{name}-*"):
            print(queued.name.rpartition("-")[2])
    return 0


if __name__ == "__main__":
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if name.endswith(".py"):
        name, words = words[0], words[1:]
    with (STATE / "log").open("a") as log:
        log.write(" ".join([name, *words]) + "\n")
    programs = {"sbatch": sbatch, "job": job, "srun": srun, "scontrol": scontrol, "scancel": scancel, "squeue": squeue}
    sys.exit(programs[name](words))
