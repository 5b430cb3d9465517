"""The run file: read, checked, anchored at its folder, with the origin of every value.

Order of precedence: defaults < what suits a GPU < preset (`learner.preset`) < run file (YAML)
< environment (`STREAMRL_LEARNER__LR=1e-6`) < `--set learner.lr=1e-6`.
Unknown keys are refused with a did-you-mean. Paths in a run file are relative to that file. `load` returns the
resolved `RunConfig` and a map from dotted key to origin; `up` writes both into the run directory as `run.json`, and
every role reads only that file, so all roles of a run see the same values.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import orjson
from pydantic import BaseModel, ValidationError

from streamrl.atomic import write_whole
from streamrl.config import RewardModelConfig, RewardSpec, RunConfig
from streamrl.config.base import MODEL, SERVER_KINDS, Section
from streamrl.config.presets import lay_beneath, lay_gpu_beneath
from streamrl.config.words import explain
from streamrl.cores import has_gpu
from streamrl.errors import ConfigError

RUNS: Final = Path("runs")
"""Where run directories are made and looked for unless `--run` names one."""
OF_A_GPU: Final = "of a GPU (bfloat16 on its tensor cores; float32 master weights)"
"""Origin of a default that the machine has chosen."""
RUN_DIGEST: Final = "STREAMRL_RUN_DIGEST"
"""Variable of `up --prepare` and the roles of rendered manifests: the digest of the configuration that they are of."""


class LoadedConfig(BaseModel):
    config: RunConfig
    # Of each dotted key: default, of a GPU, preset, file, env or set.
    origins: dict[str, str]


def load(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Load and check the configuration of a run.

    `overrides` are `a.b=c` of `--set`, with YAML values; `STREAMRL_A__B=c` in `environ` (default: the process
    environment) sets `a.b`. The message of a ConfigError names the key, the origin of its value, and a suggestion for
    an unknown key.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        values = _read_yaml(path)
        origins.update({key: f"file {path}" for key, _ in leaves(values)})
    variables = os.environ if environ is None else environ
    for name, raw in sorted(variables.items()):
        if name.startswith("STREAMRL_") and name.removeprefix("STREAMRL_").split("__")[0].lower() in _SECTIONS:
            _put(values, origins, name.removeprefix("STREAMRL_").lower().replace("__", "."), raw, f"env {name}")
    for item in overrides:
        key, equals, raw = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: no '='", "write --set learner.lr=1e-6")
        _put(values, origins, key.strip(), raw, "--set")
    learner = values.get("learner")
    preset = learner.get("preset") if isinstance(learner, dict) else None
    origins.update({".".join(key): f"preset {preset}" for key in lay_beneath(values, preset)})
    origins.update({".".join(key): OF_A_GPU for key in lay_gpu_beneath(values, gpu=has_gpu())})
    config = _validate(values, origins)
    if path is not None:
        config = _anchor(config, path.resolve().parent)
    for key, _ in leaves(config.model_dump(mode="json")):
        origins.setdefault(key, "default")
    return LoadedConfig(config=config, origins=origins)


def save(loaded: LoadedConfig, path: Path) -> None:
    write_whole(path, orjson.dumps(loaded.model_dump(mode="json"), option=orjson.OPT_INDENT_2))


def read_saved(path: Path) -> LoadedConfig:
    """Read what `save` wrote; `ConfigError` if the file is missing or of another version."""
    try:
        return parse_saved(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path.parent} is not a run directory: {path.name} is missing", "name one with --run"
        ) from error


def parse_saved(content: bytes, place: str) -> LoadedConfig:
    """As `read_saved`, of what is kept elsewhere; `place` names it in errors."""
    try:
        return LoadedConfig.model_validate(_as_of_now(orjson.loads(content)))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{place} does not fit this version of streamrl: {_first(error)}") from error


_GONE: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("decode",),
    "episode": ("processes",),
    "learner": ("rows", "share_prompts"),
    "rollout": ("host",),
    "weights": ("relay",),
    "reward_worker": ("gateway_port", "gateway_host", "gateway_token_file"),
}


def _as_of_now(saved: Any) -> Any:
    """What an earlier version saved, without what is gone; a run that was started with it can be looked at."""
    config = saved.get("config") if isinstance(saved, dict) else None
    if not isinstance(config, dict):
        return saved
    sections = {name: values for name, values in config.items() if isinstance(values, dict)}
    for name, keys in _GONE.items():
        for key in keys:
            sections.get(name, {}).pop(key, None)
    learner = sections.get("learner", {})
    if "sinks" in learner:
        learner["report_to"] = learner.pop("sinks")
    if learner.get("matmul_precision") == "auto":
        learner["matmul_precision"] = "highest"
    if isinstance(critic := learner.get("critic"), dict):
        critic.pop("coefficient", None)
        if critic.get("kind") == "head":  # its checkpoints are refused by the learner: their parts do not fit
            critic["kind"] = "model"
    if (engine := sections.get("engine", {})).get("kind") == "hf":
        engine |= {"url": (), "api_key_file": None}
    _refused_now(sections)
    if "host" not in engine:
        _engines_of_now(sections)
    if isinstance(shares := sections.get("episode", {}).pop("shares", None), dict):
        sections["episode"].setdefault("scoring_share", shares.get("scoring", 0.1))
    if "files" in (archive := sections.get("archive", {})):
        archive["max_bytes"] = None  # it kept so many files, whatever their size
        archive.pop("files")
    return saved


def _refused_now(sections: dict[str, dict[str, Any]]) -> None:
    """Put what takes its place where values were allowed that a new run may not have."""
    lora, weights = sections.get("learner", {}).get("lora"), sections.get("weights", {})
    if lora and sections.get("engine", {}).get("kind") not in SERVER_KINDS:
        lora["publish"] = "merged"
    if weights.get("transport") == "collective" and "delta" in weights:
        weights["delta"]["enabled"] = False
    if agent := sections.get("episode", {}).get("agent"):
        agent.pop("keep", None)
    gone = {"wake_at", "wake_after"}
    if sections.get("rollout", {}).get("placement") != "colocated":
        gone.add("sleep")
    for served in sections.get("reward_models", {}).values():
        for key in gone & set(served):
            del served[key]


def _engines_of_now(sections: dict[str, dict[str, Any]]) -> None:
    """From when replicas started servers: now each server is one of a role of its own, which has the GPUs."""
    engine, resources = sections.get("engine", {}), sections.get("cluster", {}).get("resources") or {}
    resources.pop("agent", None)
    if engine.get("kind") in SERVER_KINDS:
        if not engine.get("url"):
            engine["servers"] = engine.get("servers", 1) * sections.get("rollout", {}).get("replicas", 1)
        if "rollout" in resources:
            resources["engine"] = resources.pop("rollout")


_SCHEMA_HINT = "`streamrl config schema` lists every key with its type, range and meaning"
_EXAMPLE_HINT = "`streamrl init` writes one that works"


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # here: commands that only look read run.json

    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"run file {path} does not exist", "write one with `streamrl init`") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, or bytes that are not text
        raise ConfigError(f"{path} is not valid YAML: {error}", _EXAMPLE_HINT) from error
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}", _EXAMPLE_HINT) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of keys to values", _EXAMPLE_HINT)
    return values


def _put(values: dict[str, Any], origins: dict[str, str], key: str, raw: str, origin: str) -> None:
    import yaml

    try:
        value = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin} {key}: {raw!r} is not a YAML value", "quote it as in YAML") from error
    if isinstance(value, str):
        value = _number(value)
    *parents, last = key.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            hint = f"{parent} is a list, which is set as a whole" if isinstance(child, list) else _SCHEMA_HINT
            raise ConfigError(f"{origin} {key}: {parent} is not a section", hint)
        node = child
    node[last] = value
    origins[key] = origin


def _number(text: str) -> str | float:
    """YAML 1.1 reads `1e-6` as a string; people mean a number. UnicodeEncodeError: it holds a part of a character."""
    text.encode()
    try:
        return float(text) if "e" in text.lower() else text
    except ValueError:
        return text


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted key, value)` of nested mappings; lists are values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _validate(values: dict[str, Any], origins: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate(_floats(values))
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"configuration: {error.object!a} holds a part of a character", "write text in UTF-8"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = origins.get(key, "")
        where = f" ({origin})" if origin else ""
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {key}{where}", _suggest(first["loc"])) from error
        raise ConfigError(f"{key or 'configuration'}: {explain(first)}{where}", _SCHEMA_HINT) from error


def _floats(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _floats(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_floats(value) for value in node]
    return _number(node) if isinstance(node, str) else node


def _suggest(location: Sequence[str | int]) -> str:
    model: Any = RunConfig
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        entries = [kind for kind in get_args(model) if kind is not ...]  # of a list or map: its entry is the last
        model = field.annotation if field is not None else [RewardSpec, *entries][-1]
    known = list(getattr(model, "model_fields", {}))
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'it'}: {explain(first)}"


def _anchor(config: RunConfig, folder: Path) -> RunConfig:
    """Make the paths of a run file absolute; a model is a path only if something is there."""

    def served(reward: RewardModelConfig) -> RewardModelConfig:
        return reward if reward.url else reward.model_copy(update={"model": _model(reward.model, folder)})

    def asked(reward: RewardSpec) -> RewardSpec:
        args = {**reward.args}
        for name in _FILES_OF_REWARDS.get(reward.use, ()):
            if isinstance(args.get(name), str):
                args[name] = str((folder / args[name]).resolve())
        if reward.use == "reward_model" and isinstance(args.get("tokenizer"), str):
            args["tokenizer"] = _model(args["tokenizer"], folder)
        return reward.model_copy(update={"args": args})

    placed: RunConfig = _placed(config, folder)
    return placed.model_copy(
        update={
            "rewards": tuple(map(asked, config.rewards)),
            "reward_models": {name: served(reward) for name, reward in placed.reward_models.items()},
            "plugin_paths": (folder, *placed.plugin_paths),
        }
    )


def _placed(value: Any, folder: Path) -> Any:
    """`value` with all paths in it absolute; found by their types, so that no key can be forgotten."""
    if isinstance(value, Path):
        return (folder / value).resolve()
    if isinstance(value, Section):
        found = {}
        for name, field in type(value).model_fields.items():
            place = _model if MODEL in field.metadata else _placed
            found[name] = place(getattr(value, name), folder)
        return value.model_copy(update=found)
    if isinstance(value, dict):
        return {key: _placed(item, folder) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_placed(item, folder) for item in value)
    return value


def _model(name: str | None, folder: Path) -> str | None:
    return str((folder / name).resolve()) if name and (folder / name).exists() else name


_FILES_OF_REWARDS: Final = {"json_schema": ("file",), "reward_model": ("chat_template",)}
"""Arguments of rewards that are paths, by `use`."""
_SECTIONS = frozenset(RunConfig.model_fields)
