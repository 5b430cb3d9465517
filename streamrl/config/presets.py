"""Algorithms by name: what `learner.preset` stands for, under the keys of the run file.

A preset lies between the defaults and the run file: every key that is set wins over it. docs/reference/presets/
has a page for each with its formula, its source and when to use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Final

_CLIP: Final = {"use": "ppo", "args": {"clip_low": 0.2, "clip_high": 0.28}, "aggregate": "token_mean"}
_TRUNCATED: Final = {"base": "decoupled", "gates": [{"use": "tis", "high": 2.0}, {"use": "veto", "low": 0.0001}]}
_RATIO: Final = {"use": "cispo", "args": {"low": 0.0, "cap": 20.0}, "aggregate": "token_mean"}
_SINGLE: Final = {"group_size": 1, "min_group": 1}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "grpo": {"learner": {"advantage": {"use": "grpo"}, "loss": _CLIP, "correction": _TRUNCATED}},
        "ppo": {
            "learner": {
                "advantage": {"use": "gae"},
                "critic": {"kind": "model", "clip": 0.5, "gamma": 1.0, "lam": 0.95, "warmup_steps": 5},
                "loss": {"use": "ppo", "args": {"clip_low": 0.2, "clip_high": 0.2}, "aggregate": "token_mean"},
                "correction": _TRUNCATED,
                "passes": 1,
                "mini_batches": 2,
            }
        },
        "egpo": {
            "learner": {
                "advantage": {
                    "use": "egpo",
                    "args": {"mode": "bonus", "part": "thinking", "bonus": 0.4, "bonus_share": 2.0},
                },
                "loss": _CLIP,
                "correction": _TRUNCATED,
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
                "reference": {"kind": "frozen"},
            }
        },
        "egpo_zhao": {
            "learner": {
                "advantage": {"use": "egpo", "args": {"mode": "ratio", "lambda_min": 0.5, "lambda_max": 2.0}},
                "loss": _CLIP,
                "correction": _TRUNCATED,
            }
        },
        "scalerl": {
            "max_staleness": 8,
            "learner": {
                "advantage": {"use": "grpo_batch_std", "zero_variance": "drop"},
                "loss": {"use": "cispo", "args": {"cap": 5.0}, "aggregate": "prompt_mean"},
                "correction": {"base": "bypass", "gates": []},
                "head_float32": True,
            },
        },
        "kpop": {
            "learner": {
                "advantage": {"use": "grpo"},
                "loss": _RATIO,
                "correction": {"base": "bypass", "gates": [{"use": "binary_kl", "level": "token", "high": 0.1}]},
            }
        },
        "ipo": {
            "learner": {
                "advantage": {"use": "dr_grpo"},
                "loss": _RATIO,
                "correction": {"base": "bypass", "gates": [{"use": "tv", "high": 0.3}]},
            }
        },
        "sao": {
            "sampling": _SINGLE,
            "learner": {
                "groups_per_step": 64,
                "advantage": {"use": "gae", "args": {"alpha": 0.05}},
                "critic": {
                    "kind": "model",
                    "gamma": 1.0,
                    "lam": 1.0,
                    "updates_per_step": 2,
                    "freeze": "attention",
                    "warmup_steps": 10,
                },
                "loss": {"use": "reinforce", "aggregate": "token_mean"},
                "correction": {
                    "base": "bypass",
                    "gates": [{"use": "icepop", "level": "token", "low": 0.2, "high": 4.0}],
                },
            },
        },
        "flash_reinforce": {
            "sampling": _SINGLE,
            "learner": {
                "groups_per_step": 64,
                "advantage": {"use": "batch_mean"},
                "loss": {**_RATIO, "aggregate": "sequence_mean"},
                "correction": {"base": "bypass", "gates": [{"use": "binary_kl", "level": "sequence", "high": 0.005}]},
            },
        },
        "high_staleness": {
            "learner": {
                "advantage": {"use": "grpo"},
                "loss": {
                    "use": "vespo",
                    "args": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
                    "aggregate": "token_mean",
                },
                "correction": {"base": "bypass", "gates": [], "lr_scale": "staleness"},
            }
        },
        "on_policy": {
            "max_staleness": 0,
            "learner": {
                "advantage": {"use": "grpo"},
                "loss": _CLIP,
                "correction": {"base": "uncorrected", "gates": []},
                "passes": 1,
                "mini_batches": 1,
                "publish_every": 1,
                "max_token_staleness": 0,
            },
        },
    }
)

_LEARNER_ON_GPU: Final = {"model": {"dtype": "bfloat16"}, "learner": {"matmul_precision": "high"}}
_ENGINE_ON_GPU: Final = {"engine": {"dtype": "bfloat16"}, "weights": {"dtype": "bfloat16"}}
_BELONGS_TO: Final = {"args": "use", "gates": "base"}
"""Keys that belong to another one: a run file that changes the other does not get the preset's value of these."""


def lay_beneath(values: dict[str, Any], name: Any) -> Iterator[tuple[str, ...]]:
    """Fill what is not set in a run's values from a preset, and yield the path of each key that came from it.

    Lists are taken whole. If the run sets another `use` than the preset, the preset's `args` beside it are left out,
    and so are its `gates` with another `base`; the defaults apply there. An unknown `name` fills nothing: the
    configuration reports it.
    """
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is not None:
        yield from _fill(values, preset, ())


def lay_gpu_beneath(values: dict[str, Any], *, gpu: bool) -> Iterator[tuple[str, ...]]:
    """As `lay_beneath`, for what computes on a GPU: its tensor cores take bfloat16. `gpu`: this machine has one.

    Weights, gradients and their reduction stay float32 in the learner. Servers of others count as the learner does.
    """
    learner = _on_gpu(values, "learner", gpu=gpu)
    if learner:
        yield from _fill(values, _LEARNER_ON_GPU, ())
    if learner if _at(values, "engine", "url") else _on_gpu(values, "engine", gpu=gpu):
        yield from _fill(values, _ENGINE_ON_GPU, ())


def _on_gpu(values: Mapping[str, Any], section: str, *, gpu: bool) -> bool:
    device = str(_at(values, section, "device") or "auto")
    return device.startswith("cuda") or (
        device == "auto" and bool(gpu or _at(values, "cluster", "resources", section, "gpus"))
    )


def _at(values: Any, *path: str) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _fill(values: dict[str, Any], preset: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    odd = {key for key, owner in _BELONGS_TO.items() if values.get(owner, preset.get(owner)) != preset.get(owner)}
    for key, value in preset.items():
        if key in odd:
            continue
        if isinstance(value, Mapping):
            inner = values.setdefault(key, {})
            if isinstance(inner, dict):
                yield from _fill(inner, value, (*path, key))
        elif key not in values:
            values[key] = deepcopy(value)
            yield (*path, key)
