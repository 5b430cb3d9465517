"""The process of an agent: what it is started with, and what of this process it may see."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from streamrl.config.episode import AgentConfig
from streamrl.errors import PluginError
from streamrl.isolation.kept_process import KeptProcess

COMMAND_HINT: Final = "episode.agent.command: a program of the PATH, or with its whole path"
_PASSED: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG(UAGE)?|LC_.*|TZ|TMP(DIR)?|TEMP|XDG_.*|LD_LIBRARY_PATH"
    "|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|HF_HOME|HF_HUB_OFFLINE"
    "|(?i:(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
)
"""Variables that an agent gets from this process. All others stay here, because a model's output drives the agent, and
many of them are keys."""
_LOG_BYTES: Final = 4 << 20


async def start_agent(
    agent: AgentConfig, folder: Path, variables: Mapping[str, str], secret: str, beside: Sequence[Path] = ()
) -> KeptProcess:
    """Start the command in `folder/work`, or where the configuration says; return it when it runs.

    It prints into `folder/output`, without `secret`. Arguments that name files in `beside` or in the working directory
    of this process are found from any directory. PluginError: it cannot be started.
    """
    work = agent.directory or folder / "work"
    if agent.directory is None:
        work.mkdir()
    program, *arguments = agent.command
    places = (*beside, Path.cwd())
    argv = [program if "/" not in program else _resolved(program, places)]
    argv += [_resolved(argument, places) for argument in arguments]
    process = KeptProcess(folder / "output", _LOG_BYTES, secrets=[secret], own=folder)
    try:
        await process.start(argv, _environment(agent, variables), work)
    except TimeoutError:  # a busy host is no fault of the command
        raise
    except OSError as error:
        where = f"{COMMAND_HINT}; episode.agent.directory: an existing one"
        raise PluginError(f"the agent {program} cannot be started in {work}: {error}", where) from error
    return process


def cause_of_end(process: KeptProcess) -> str:
    """How an agent ended, with the last lines that it printed."""
    tail = process.tail
    return f"ended ({process.end}); it printed last:\n{tail}" if tail else f"ended ({process.end}) and printed nothing"


def _resolved(argument: str, places: Sequence[Path]) -> str:
    found = (folder / argument for folder in places if argument and (folder / argument).is_file())
    return str(next(found, argument))


def search_path(variables: Mapping[str, str]) -> str:
    """Where programs are looked for: `python` is the interpreter of this process, also if no environment is active."""
    return variables.get("PATH", f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")


def _environment(agent: AgentConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """What an agent may see of the environment of this process; requests to the endpoint take no proxy."""
    environ = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    host = variables["OPENAI_BASE_URL"].split("/")[2].rpartition(":")[0].strip("[]")
    for name in ("NO_PROXY", "no_proxy"):
        environ[name] = ",".join(filter(None, [environ.get(name), host]))
    return {**environ, **agent.variables, **variables, "PATH": search_path(agent.variables)}
