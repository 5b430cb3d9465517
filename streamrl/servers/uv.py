"""`uv pip install` with the settings of pip: where pip finds its packages, uv finds them too.

    python streamrl/servers/uv.py --python .venv/bin/python --editable .

The Makefile runs this file before anything is installed, so it imports the standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Final

# Variables, because URLs may hold passwords, and every user of the machine can read arguments.
_VARIABLES: Final = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}


def find_uv() -> str | None:
    """Return the uv beside this interpreter, else the one on PATH."""
    return shutil.which("uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))  # noqa: PTH120


def install_command() -> tuple[list[str], dict[str, str]]:
    """`uv pip install` with its first arguments, and its environment: uv's variables win, its indexes come first."""
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    settings = _pip_settings()
    settings["extra-index-url"] = f"{environ.pop('UV_INDEX', '')} {settings.get('extra-index-url', '')}"
    for key, variable in _VARIABLES.items():
        if words := settings.get(key, "").split():
            environ.setdefault(variable, ("," if key == "find-links" else " ").join(words))
    # As pip does, it takes the best version of all indexes, and not that of the first index with any.
    command = [find_uv() or "uv", "pip", "install", "--index-strategy", "unsafe-best-match"]
    if settings.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        command.append("--no-index")
    # No variable: an option of the caller would hide it.
    command += [f"--constraint={file}" for file in settings.get("constraint", "").split()]
    return command, environ


def _pip_settings() -> dict[str, str]:
    """Return what pip's files and variables (PIP_*) say about `pip install`; nothing where there is no pip."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "false"]
    said = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)  # noqa: S603
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in said.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        by_section.get(section, {})[key] = ast.literal_eval(value)
    return by_section["global"] | by_section["install"] | by_section[":env:"]


if __name__ == "__main__":
    command, variables = install_command()
    words = [*command, *sys.argv[1:]]
    os.execvpe(words[0], words, variables)  # noqa: S606
