"""The end of a run that recorded rollouts: audit, what there is, and how to train it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.archive.reader import FOLDER, recording_files
from streamrl.commands import output
from streamrl.commands.audit import audit_run
from streamrl.commands.finish import expect_some
from streamrl.commands.rundir import find_run
from streamrl.config import RunConfig


def finish_recording(config: RunConfig, run_dir: Path) -> bool:
    """Audit the run and say what was recorded; returns whether the audit holds.

    Raises:
        Refused: as of `expect_some`.
    """
    found = asyncio.run(audit_run(find_run(run_dir)))
    files = recording_files(run_dir / FOLDER)
    size = sum(file.stat().st_size for file in files)
    output.write(f"groups recorded / dead   {found.trained} / {found.dead}")
    output.write(f"responses dead           {found.dead_samples}")
    output.write(f"recording                {run_dir / FOLDER} ({len(files)} files, {size >> 10} KiB)")
    if not found.proved:
        output.write(f"AUDIT: {found.lost} lost, {found.twice} recorded twice")
        for reason in found.unproved:
            output.write(f"AUDIT: {reason}")
    expect_some("recorded", found, run_dir)
    output.write("")
    output.write("next:")
    output.write(
        f"  streamrl up RUN.yaml --train-only {run_dir / FOLDER} --run {run_dir.parent / f'{config.name}-trained'}"
    )
    output.write(f"  streamrl audit --run {run_dir}")
    return found.proved
