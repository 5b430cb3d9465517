"""What trl's sides of the benchmarks have in common: a quiet process, threads, and the settings of `GRPOTrainer`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl


def prepare(options: dict[str, Any]) -> None:
    """Silence the libraries, and set `threads` and `precision` of torch."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    torch.set_float32_matmul_precision(options["precision"])


def model_of(folder: Path, options: dict[str, Any]) -> Any:
    """The model of a folder, with the `attention` of the options."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=options["attention"])


def training(options: dict[str, Any], output: Path | str, responses: int, **settings: Any) -> trl.GRPOConfig:
    """Settings of a step over so many responses in micro-batches of `rows`; `settings` are added to the common ones."""
    rows = min(options["rows"], responses)
    return trl.GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        activation_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=responses // rows,
        num_generations=options["size"],
        adam_beta1=0.9,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        beta=0.0,
        **settings,
    )


def racing(options: dict[str, Any], output: str, **settings: Any) -> trl.GRPOConfig:
    """Settings of a trainer that generates: those of `training`, with the limits and the schedule of the options."""
    return training(
        options,
        output,
        options["groups"] * options["size"],
        seed=options["seed"],
        max_completion_length=options["max_new_tokens"],
        max_steps=options["steps"],
        learning_rate=options["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options["warmup_steps"],
        **settings,
    )
