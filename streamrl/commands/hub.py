"""`streamrl export --push`: the card of a model, and its way to a hub. The token comes from HF_TOKEN or a login."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Unreachable, UsageError, need_packages
from streamrl.runtime.summary import SUMMARY_FILE


def model_card(config: RunConfig, run_dir: Path, step: int, repository: str) -> str:
    """README.md of a checkpoint; with the accuracies of `summary.json` if that is of the same step."""
    base, file = Path(config.model.path), run_dir / SUMMARY_FILE
    on_hub = "" if base.is_absolute() else f"base_model: {base}\n"
    summary: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}
    rows = {
        "base model": base if on_hub else base.name,
        "run": config.name,
        "steps": step,
        "data": ", ".join(one.name or one.stem for one in config.data.train),
        "rewards": ", ".join(reward.name or reward.use for reward in config.rewards),
    }
    if summary.get("steps") == step:
        for source, figures in {"": summary, **{f" of {name}": of for name, of in summary["sources"].items()}}.items():
            ends = [figures.get(f"accuracy_{when}") for when in ("before", "after")]
            if None not in ends:
                rows[f"held-out accuracy{source}"] = "{:.3f} before training, {:.3f} after".format(*ends)
    head = f"---\nlibrary_name: transformers\n{on_hub}tags: [streamrl, reinforcement-learning]\n---\n"
    head += f"# {repository}\n\nTrained by reinforcement learning with streamrl.\n\n| | |\n|---|---|\n"
    return head + "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def push_model(folder: Path, repository: str) -> str:
    """Push the files of a model in one commit; returns the URL of the repository."""
    need_packages("--push", "huggingface_hub")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        made = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Model trained with streamrl")
    except HFValidationError as error:
        raise UsageError(f"--push {repository}: {error}", "write OWNER/NAME") from error
    except (HTTPError, OSError) as error:
        if getattr(getattr(error, "response", None), "status_code", 500) >= 500:
            raise Unreachable(f"{api.endpoint}: {error}", "try again later; HF_ENDPOINT names another hub") from error
        hint = "set HF_TOKEN to a token that may write there, or log in with `hf auth login`"
        raise ConfigError(f"the hub refuses {repository}: {error}", hint) from error
    return str(made)
