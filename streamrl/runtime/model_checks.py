"""The part of the preflight that checks models: in directories, in the cache of the hub, on the hub itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import orjson

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, StreamrlError, Unreachable

DEADLINE: Final = 5.0
"""Seconds after which the hub counts as not reachable."""
_DIRECTORY_HINT: Final = "name a model directory, or a hub name as owner/name"
_REFUSED: Final = frozenset({401, 403, 404})
_ON: Final = frozenset({"1", "ON", "YES", "TRUE"})
_CONFIG: Final = "config.json"
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
"""As transformers names them; of a large model a file with `.index.json` behind the name lists the parts."""


def check_models(config: RunConfig) -> str:
    """Where each model of the run comes from, unless others serve it.

    Unreachable: a model is not complete on this machine, and the hub does not answer within `DEADLINE`.
    """
    return ", ".join(dict.fromkeys(_place(config, key, name) for key, name in _named(config)))


def weight_files(path: Path) -> list[Path]:
    return [*path.glob("*.safetensors"), *path.glob("*.bin")]


def _named(config: RunConfig) -> Iterator[tuple[str, str]]:
    learner = config.learner
    yield "model.path", config.model.path
    if config.model.tokenizer is not None:
        yield "model.tokenizer", config.model.tokenizer
    if learner.reference.kind == "frozen" and learner.reference.path is not None:
        yield "learner.reference.path", learner.reference.path
    if learner.critic.kind == "model" and learner.critic.path is not None:
        yield "learner.critic.path", learner.critic.path


def _place(config: RunConfig, key: str, name: str) -> str:
    path = Path(name)
    if path.is_dir():
        if key != "model.tokenizer":
            _check_directory(path)
        return str(path)
    owner, slash, rest = name.partition("/")
    beside_run_file = [folder / owner for folder in (Path(), *config.plugin_paths)]
    if not slash or not owner or "/" in rest or owner.startswith(".") or any(p.is_dir() for p in beside_run_file):
        raise ConfigError(f"{key} {name} does not exist", _DIRECTORY_HINT)
    if find_spec("huggingface_hub") is None:
        return f"{name} (not looked for: huggingface_hub is not installed)"
    if _is_cached(key, name):
        return f"{name} (from the local cache of the hub)"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _ON:
        raise ConfigError(
            f"{key} {name} is not complete in the local cache of the hub, and HF_HUB_OFFLINE forbids to ask the hub",
            _without_network(key),
        )
    _ask_hub(key, name)
    return f"{name} (from the hub)"


def _check_directory(path: Path) -> None:
    if not (path / _CONFIG).is_file():
        raise ConfigError(
            f"{path} is not a model directory: {_CONFIG} is missing", "name a Hugging Face model directory"
        )
    if not weight_files(path):
        raise ConfigError(f"{path} has no weights (*.safetensors)", "save the model with save_pretrained")


def _is_cached(key: str, name: str) -> bool:
    """Whether the cache is complete: an interrupted download leaves the small files without weights.

    Of a tokenizer only one file is checked, because the others differ between kinds.
    """
    if key == "model.tokenizer":
        return any(_cached(name, file) for file in (_CONFIG, "tokenizer_config.json"))
    return _cached(name, _CONFIG) is not None and any(_has_weights(name, file) for file in _WEIGHTS)


def _cached(name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _has_weights(name: str, file: str) -> bool:
    """The file itself, or its index and every file that the index names."""
    if _cached(name, file):
        return True
    index = _cached(name, f"{file}.index.json")
    try:
        parts = set(orjson.loads(index.read_bytes())["weight_map"].values()) if index else set()
        return bool(parts) and all(_cached(name, part) for part in parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged index: the hub has a whole one
        return False


def _ask_hub(key: str, name: str) -> None:
    """Ask the hub for a model, in a thread that may be left behind: the look-up of a host has no deadline."""
    found: Future[StreamrlError | None] = Future()
    threading.Thread(target=lambda: found.set_result(_asked(key, name)), name="hub", daemon=True).start()
    try:
        error = found.result(DEADLINE)
    except NoAnswer:
        raise _unreachable(key, name, f"no answer within {DEADLINE:g} s") from None
    if error is not None:
        raise error


def _asked(key: str, name: str) -> StreamrlError | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        url = hf_hub_url(name, _CONFIG, endpoint=endpoint)
        get_hf_file_metadata(url, timeout=DEADLINE, endpoint=endpoint)
    except HFValidationError as error:
        return ConfigError(f"{key} {name} is not the name of a model: {error}", _DIRECTORY_HINT)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in _REFUSED:
            return _unreachable(key, name, f"it answers HTTP {status}")
        if key == "model.tokenizer" and status == 404:
            return None  # a repository may hold a tokenizer alone; the role that reads it says what is missing
        return ConfigError(
            f"{key} {name}: the hub has no such model, or does not give it to you (HTTP {status})",
            "check the name; for a private or gated model set HF_TOKEN, or run `hf auth login`",
        )
    except Exception as error:  # noqa: BLE001 (the client's errors of the network differ between its versions)
        return _unreachable(key, name, str(error) or type(error).__name__)
    return None


def _unreachable(key: str, name: str, why: str) -> Unreachable:
    return Unreachable(
        f"{key} {name} is not complete on this machine, and the hub is not reachable: {why}", _without_network(key)
    )


def _without_network(key: str) -> str:
    return f"set {key} to a directory with the model; `streamrl init --template sort` makes a run that needs no network"
