"""`streamrl engines check`: what an engine can do on this machine, as a table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from streamrl.commands import output
from streamrl.errors import ConfigError, ExitCode, UsageError
from streamrl.servers import environments

SCHEMA: Final = "streamrl.engines.check/1"


def check(kind: Literal["vllm", "sglang", "hf"], given: Path | None, *, json: bool) -> int:
    """Start the engine on a tiny model, try all that a run may ask of it, and show what was found.

    Its files are gone afterwards, unless something failed.

    Args:
        kind: of the engine.
        given: environment of its servers; None: where runs look for it.
        json: one envelope at the end instead of a line for each finding.

    Returns:
        0 all is well (also when it cannot do something that runs need not have), 1 something failed.

    Raises:
        UsageError: `hf` with an environment.
        ConfigError: the environment is missing, or torch is.
    """
    if kind == "hf" and given is not None:
        raise UsageError("hf runs in this process: --environment is of vllm and sglang")
    environment = None if kind == "hf" else environments.find_environment(given, kind, key="--environment")
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the check needs {', '.join(missing)}", "pip install 'streamrl[train]'")
    from streamrl.producers.examination import Examination, Finding

    logging.getLogger("streamrl").setLevel(logging.CRITICAL)  # what is killed and refused here is so on purpose

    def heard(finding: Finding) -> None:
        if not json:
            output.write(f"{finding.verdict:6}  {finding.name:28}  {finding.detail}")

    if not json:
        output.write(f"{kind} in {environment or 'this process'}")
    folder = Path(tempfile.mkdtemp(prefix=f"streamrl-check-{kind}-"))
    with contextlib.ExitStack() as left:
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        findings = asyncio.run(Examination(kind, folder, heard, environment=environment).run())
        failed = any(finding.verdict == "failed" for finding in findings)
        if failed:
            left.pop_all()  # the log that a finding names is in it
    if json:
        data: dict[str, Any] = {
            "kind": kind,
            "environment": None if environment is None else str(environment),
            "ok": not failed,
            "findings": [
                {"name": finding.name, "verdict": finding.verdict, "detail": finding.detail} for finding in findings
            ],
        }
        output.write_json(SCHEMA, data)
    return int(ExitCode.FAILURE if failed else ExitCode.OK)
