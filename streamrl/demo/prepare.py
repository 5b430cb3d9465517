"""Prepare the sort demo: prompts, tokenizer, and a model that knows both a right and a wrong rule.

The model is a 1M-parameter Qwen2, trained on a mixture: 40 % of its lessons sort the digits ascending (right), 60 %
descending (wrong). It then answers about 0.42 of all samples rightly, so reinforcement learning has to find out which
of two skills pays. The files are made once, in `cache/` in DIR; `--force` makes them again. Run it as
`python -m streamrl.demo.prepare DIR`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from streamrl.atomic import whole_directory
from streamrl.demo import task
from streamrl.errors import ExitCode

STEPS, WARM_UP, DECAY_FROM, BATCH, LEARNING_RATE = 650, 100, 300, 64, 2e-3
SHARE_RIGHT = 0.4
TRAINING_PROMPTS, HELD_OUT_PROMPTS = 16384, 1024
LINE_EVERY = 10.0  # seconds, without a terminal for a progress bar


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per printable character; `<pad>` 0, `<bos>` 1, `<eos>` 2.

    Byte pairs without merges: transformers loads the tokenizer of any Qwen2 model in this form, whatever class its
    directory names.
    """
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {"<pad>": task.PAD, "<bos>": task.BOS, "<eos>": task.EOS}
    for offset, character in enumerate(task.CHARACTERS):
        vocabulary[alphabet.pre_tokenize_str(character)[0][0]] = task.FIRST_CHARACTER + offset
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=task.VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=task.PAD,
        bos_token_id=task.BOS,
        eos_token_id=task.EOS,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.update(eos_token_id=task.EOS, pad_token_id=task.PAD)
    return model


def lessons(source: random.Random) -> list[tuple[list[int], int]]:
    """One batch of `(token ids, prompt length)`, shortest first. The wrong rule is more frequent."""
    batch: list[tuple[list[int], int]] = []
    while len(batch) < BATCH:
        digits = task.draw_digits(source)
        prompt = digits + "="
        if task.held_out(prompt):
            continue
        answer = sorted(digits, reverse=source.random() >= SHARE_RIGHT)
        batch.append(([*task.encode(prompt + "".join(answer)), task.EOS], len(prompt)))
    return sorted(batch, key=lambda lesson: len(lesson[0]))


def loss_of(model: Qwen2ForCausalLM, lessons: list[tuple[list[int], int]]) -> torch.Tensor:
    longest = -(-max(len(ids) for ids, _ in lessons) // 16) * 16
    tokens = torch.full((len(lessons), longest), task.PAD)
    labels = torch.full((len(lessons), longest), -100)
    for row, (ids, prompt) in enumerate(lessons):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt : len(ids)] = tokens[row, prompt : len(ids)]
    # Right padding under a causal mask reaches no token that counts, so no padding mask is needed.
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


def warm_start(progress: Progress) -> Qwen2ForCausalLM:
    """Teach both rules: AdamW 2e-3, 100 steps of warm-up, linear decay to 0 from step 300 to 650."""
    torch.manual_seed(0)
    source, model = random.Random(0), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    bar = progress.add_task("warm start", total=STEPS, loss=float("nan"))
    due = 0.0
    for step in range(STEPS):
        batch = lessons(source)
        count = sum(len(ids) - prompt for ids, prompt in batch)
        total = 0.0
        for start in range(0, BATCH, 16):
            loss = loss_of(model, batch[start : start + 16]) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / WARM_UP) * min(1.0, (STEPS - step) / (STEPS - DECAY_FROM))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(bar, advance=1, loss=total)
        if progress.disable and time.monotonic() >= due:
            due = time.monotonic() + LINE_EVERY
            progress.console.print(f"warm start: step {step + 1}/{STEPS}, loss {total:.3f}")
    return model


def write_prompts(folder: Path) -> None:
    for name, count, evaluation in (("train", TRAINING_PROMPTS, False), ("held_out", HELD_OUT_PROMPTS, True)):
        rows = itertools.islice(task.problems(1, evaluation=evaluation), count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path, console: Console) -> None:
    """Fill `cache/` in `folder` atomically, so that a half-made cache is never used."""
    with whole_directory(folder / "cache") as draft:
        console.print(f"writing {TRAINING_PROMPTS} prompts, and {HELD_OUT_PROMPTS} held-out ones")
        write_prompts(draft)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        loss = TextColumn("loss {task.fields[loss]:.3f}")
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")  # oneDNN: twice as fast on CPUs, fp32 results without AMX
        try:
            with Progress(*columns, loss, console=console, disable=not console.is_terminal) as progress:
                model = warm_start(progress)
        finally:
            torch.set_float32_matmul_precision(precision)  # "medium" would make a caller's engine use bfloat16 on AMX
        console.print(f"writing the model and its tokenizer to {folder / 'cache'}")
        disable_progress_bar()
        model.save_pretrained(draft / "model")
        make_tokenizer().save_pretrained(draft / "model")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for another preparation of this directory."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory that `cache/` is made in")
    parser.add_argument("--force", action="store_true", help="make everything again")
    given = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cache = given.folder / "cache"
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
        with _alone(given.folder):
            if cache.exists() and not given.force:
                console.print(f"warm start: found in {cache} (prepared before; --force makes it again)")
            else:
                prepare(given.folder, console)
    except OSError as error:
        console.print(f"error: {error.filename or given.folder}: {error.strerror or error}")
        return ExitCode.CANNOT_CREATE
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
