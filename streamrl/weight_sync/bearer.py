"""The bearer token of a run's weights: a file that the learner's host makes and the other hosts are given."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from streamrl.errors import CannotCreate, ConfigError

TOKEN_VARIABLE: Final = "STREAMRL_WEIGHTS_TOKEN_FILE"  # noqa: S105  (a name, no secret)
_FILE: Final = "weights.token"
_MIN_CHARACTERS: Final = 16


def token_path(run_dir: Path) -> Path:
    """Return the file with the token: that of $STREAMRL_WEIGHTS_TOKEN_FILE, else RUN_DIR/weights.token."""
    named = os.environ.get(TOKEN_VARIABLE)
    return Path(named) if named else run_dir / _FILE


def read_token(run_dir: Path) -> str:
    """Return the token.

    Raises:
        ConfigError: there is no such file, or it holds too little.
    """
    path = token_path(run_dir)
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no token for the weights in {path}: {error}",
            f"copy RUN_DIR/{_FILE} of the learner's host to this host and name it in ${TOKEN_VARIABLE}",
        ) from error
    if len(token) < _MIN_CHARACTERS:
        raise ConfigError(f"the token in {path} has fewer than {_MIN_CHARACTERS} characters", "remove the file")
    return token


def make_token(run_dir: Path) -> str:
    """Return the token; the file is made with a new one, readable by its owner alone, when it is not there.

    Raises:
        CannotCreate: the file cannot be written.
        ConfigError: the file holds too little.
    """
    path = token_path(run_dir)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    if not path.exists():
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            draft.rename(path)
        except OSError as error:
            raise CannotCreate(f"cannot write the token of the weights to {path}: {error}") from error
    return read_token(run_dir)
