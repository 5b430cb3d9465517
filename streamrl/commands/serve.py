"""`streamrl engines serve`: the Hugging Face engine as a server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from streamrl.commands import output
from streamrl.errors import ConfigError, StreamrlError, Unreachable, unwrap

# What a run file must have and a server does not use; small, so that no check of a run's sizes gets in the way.
_UNUSED: Final = (
    "max_staleness=0",
    "learner.groups_per_step=1",
    "checkpoint.every=1",
    "sampling.group_size=2",
    "sampling.max_new_tokens=1",
)


def serve(model: str, host: str, port: int, api_key_file: Path | None, overrides: Sequence[str]) -> int:
    """Serve a model until SIGTERM or Ctrl-C; the URL goes to stderr when requests are taken.

    Args:
        model: directory or hub name.
        host: address to listen on; any but loopback needs a key.
        port: to listen on; 0: any free one.
        api_key_file: file with the key that every request must bear.
        overrides: `engine.x=y`, `model.context=n`, `seed=n`, ..., as for a run.

    Raises:
        ConfigError: something is missing, or no such model, address or key.
    """
    missing = [name for name in ("torch", "transformers", "safetensors") if not find_spec(name)]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}", "pip install 'streamrl[train]'")
    from streamrl.http import read_key
    from streamrl.listening import take_address
    from streamrl.runfile import load

    config = load(None, [*_UNUSED, f"model.path={model}", *overrides], environ={}).config
    key = read_key("--api-key-file", api_key_file)
    with take_address(host, port, key) as listening:
        from streamrl.producers.serve.serve import serve as run
        from streamrl.runtime.logs import log_as_json

        log_as_json("engine")
        try:
            asyncio.run(run(config, listening, key=key, ready=lambda url: output.note(f"serving {model} at {url}")))
        except Unreachable as error:
            # a thread that hangs in a step would keep the process alive
            _leave(error)
    return 0


def _leave(error: StreamrlError) -> None:
    cause = unwrap(error)
    output.note(f"error: {cause}")
    sys.stdout.flush()
    os._exit(error.exit_code)
