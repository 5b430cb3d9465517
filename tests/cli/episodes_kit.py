"""A short run of episodes by a tiny model that writes calls of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import yaml

from .run_kit import cli, data_of, process

SETTINGS: dict[str, Any] = {
    "model": {"path": "model", "context": 512},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 64},
    "engine": {"slots": 16, "threads": 1},
    "rewards": [{"use": "episode"}],
    "learner": {"lr": 1e-3, "threads": 1},
    "redis": {"fsync_period": 0.1},
    "weights": {"transport": "directory"},
    "supervisor": {"max_restarts": 0},
}


def write_prompts(file: Path) -> None:
    lines = (orjson.dumps({"messages": [{"role": "user", "content": f"{n}?"}], "answer": "3"}) for n in range(64))
    file.write_bytes(b"\n".join(lines))


def audited(folder: Path, settings: dict[str, dict[str, Any]], name: str, **talker: Any) -> dict[str, Any]:
    """Train on 64 prompts with `settings` on top of the common ones; the data of its audit. `talker`: of the model."""
    from tests.producers.episodes.episode_kit import save_talker

    save_talker(folder / "model", **talker)
    write_prompts(folder / "train.jsonl")
    whole = {**SETTINGS, **{key: {**SETTINGS.get(key, {}), **section} for key, section in settings.items()}}
    (folder / "run.yaml").write_text(yaml.safe_dump({"name": name, **whole}))
    done = process("up", "run.yaml", "--screen", "plain", cwd=folder, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return data_of(cli("audit", "--json", cwd=folder).stdout, "streamrl.audit/2")
