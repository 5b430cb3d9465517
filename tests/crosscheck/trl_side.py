"""Runs in the environment of trl: its own loss, on inputs that the tests wrote, in every variant they ask for.

    .crosscheck/bin/python tests/crosscheck/trl_side.py FOLDER

FOLDER holds `model` (a Hugging Face directory), `inputs.safetensors` (what `GRPOTrainer.compute_loss` takes) and
`cases.json`: `{name: {"config": arguments of GRPOConfig, "inputs": [names of the optional inputs it gets]}}`, and
`rewards.json`, the rewards of a batch, null where there is none. It gets `losses.json` (name: loss),
`gradients.safetensors` (`name|logprobs` and `name|parameter`), `advantages.json` (`scale_rewards`: advantages) and
`versions.json`.
Nothing of streamrl is imported here.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file

OPTIONAL = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps")
WITHOUT_FILES = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "activation_checkpointing": False,
}


def main(folder: Path) -> None:
    """Go through all cases."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    inputs = load_file(folder / "inputs.safetensors")
    losses: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        trainer = make_trainer(folder, len(inputs["prompt_ids"]), case["config"])
        chosen = {key: value for key, value in inputs.items() if key not in OPTIONAL or key in case["inputs"]}
        # Set here and not by a server of vLLM, which the trainer would want to talk to.
        trainer.use_vllm = "importance_sampling_ratio" in chosen
        loss, found = differentiate(trainer, chosen)
        losses[name] = loss
        gradients |= {f"{name}|{key}": value for key, value in found.items()}
    rewards = json.loads((folder / "rewards.json").read_text())
    advantages = {scale: advantages_of(folder, rewards, scale) for scale in ("group", "none", "batch")}
    (folder / "advantages.json").write_text(json.dumps(advantages))
    (folder / "losses.json").write_text(json.dumps(losses))
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    (folder / "versions.json").write_text(json.dumps(versions))
    save_file(gradients, folder / "gradients.safetensors")


def advantages_of(folder: Path, rewards: list[float | None], scale: str) -> list[float]:
    """Advantages of a batch that the trainer generates itself, with these rewards."""
    config = {"scale_rewards": scale, "max_completion_length": 4}
    trainer = make_trainer(folder, len(rewards), config, rewards)
    trainer.model.train()
    found: list[float] = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rewards))[
        "advantages"
    ].tolist()
    return found


def make_trainer(
    folder: Path, batch: int, config: dict[str, Any], rewards: list[float | None] | None = None
) -> trl.GRPOTrainer:
    """A trainer with a fresh model, and given rewards."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        num_generations=batch // 2,
        gradient_accumulation_steps=1,
        **(WITHOUT_FILES | config),
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards or [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * batch}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )


def differentiate(trainer: trl.GRPOTrainer, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradients to log-probabilities and parameters."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    kept: list[torch.Tensor] = []
    compute = trainer._get_per_token_logps_and_entropies

    def keep_gradient(*args: Any, **kwargs: Any) -> Any:
        logprobs, *rest = compute(*args, **kwargs)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            kept.append(logprobs)
        return logprobs, *rest

    trainer._get_per_token_logps_and_entropies = keep_gradient
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    (logprobs,) = kept
    assert logprobs.grad is not None
    found = {"logprobs": logprobs.grad.contiguous(), "values": logprobs.detach().contiguous()}
    parameters = trainer.model.named_parameters()
    found |= {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
    return loss.item(), found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
