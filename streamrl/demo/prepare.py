"""Prepare a demo: prompts, tokenizer, and a model that knows both a right and a wrong rule.

The model is a 1M-parameter Qwen2, trained on a mixture of right and wrong lessons. It then answers about 0.4 of all
prompts rightly, so reinforcement learning has to find out which of its skills pays. Its weights after that training are
in `starts/`, in bfloat16. The files are made once, in `cache/` in DIR; `--force` makes them again and trains the model
here. Run it as `python -m streamrl.demo.prepare DIR --task sort` (or `tools`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from tokenizers import AddedToken, pre_tokenizers
from transformers import BaseImageProcessor, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from streamrl.atomic import whole_directory
from streamrl.cores import THREADS, share_cores, usable_cores
from streamrl.demo import task, tool_task
from streamrl.demo.task import Lesson
from streamrl.errors import ExitCode

STEPS, WARM_UP, DECAY_FROM, BATCH, LEARNING_RATE = 650, 100, 300, 64, 2e-3
TRAINING_PROMPTS, HELD_OUT_PROMPTS = 16384, 1024
STARTS: Final = Path(__file__).parent / "starts"
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


def make_chat_tokenizer() -> Qwen2Tokenizer:
    """The same with tokens for the turns of a chat and for calls of the tool, and a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(role, special=True, normalized=False) for role in tool_task.ROLES], True)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in tool_task.WORDS])
    tokenizer.chat_template = tool_task.TEMPLATE
    return tokenizer


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


def lessons(source: random.Random, lesson: Callable[[random.Random], Any]) -> list[Any]:
    """One batch, shortest first."""
    return sorted((lesson(source) for _ in range(BATCH)), key=lambda one: len(one[0]))


def loss_of(model: PreTrainedModel, lessons: list[Lesson]) -> torch.Tensor:
    longest = -(-max(len(ids) for ids, _ in lessons) // 16) * 16
    tokens = torch.full((len(lessons), longest), task.PAD)
    labels = torch.full((len(lessons), longest), -100)
    for row, (ids, written) in enumerate(lessons):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(written), tokens[row, : len(ids)], -100)
    # Right padding under a causal mask reaches no token that counts, so no padding mask is needed.
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


class Demo(NamedTuple):
    """A task: endless problems (lines of the data set), lessons for the warm start, its length, and the tokenizer.

    A lesson is ids, which of them are written, and what else `loss`, a sum over them, needs. `start` are the weights
    after the warm start.
    """

    problems: Callable[..., Iterator[dict[str, Any]]]
    lesson: Callable[[random.Random], Any]
    share_of_steps: float
    tokenizer: Callable[[], Qwen2Tokenizer]
    start: Path
    model: Callable[[], PreTrainedModel] = make_model
    loss: Callable[[Any, list[Any]], torch.Tensor] = loss_of
    processor: Callable[[], BaseImageProcessor] | None = None


DEMOS: Final = {
    "sort": Demo(task.problems, task.lesson, 1.0, make_tokenizer, STARTS / "sort.safetensors"),
    "tools": Demo(tool_task.problems, tool_task.lesson, 0.4, make_chat_tokenizer, STARTS / "tools.safetensors"),
}


def starting_model(demo: Demo) -> PreTrainedModel:
    """The model as `warm_start` left it."""
    model, weights = demo.model(), load_file(demo.start)
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def warm_start(progress: Progress, demo: Demo) -> PreTrainedModel:
    """Teach all rules: AdamW 2e-3, 100 steps of warm-up, linear decay to 0 from step 300 to 650, or a share of that."""
    torch.manual_seed(0)
    steps, warm_up, decay_from = (math.ceil(count * demo.share_of_steps) for count in (STEPS, WARM_UP, DECAY_FROM))
    source, model = random.Random(0), demo.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    bar = progress.add_task("warm start", total=steps, loss=float("nan"))
    due = 0.0
    for step in range(steps):
        batch = lessons(source, demo.lesson)
        count = sum(sum(written) for _, written, *_ in batch)
        total = 0.0
        for start in range(0, BATCH, 16):
            loss = demo.loss(model, batch[start : start + 16]) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / warm_up) * min(1.0, (steps - step) / max(1, steps - decay_from))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(bar, advance=1, loss=total)
        if progress.disable and time.monotonic() >= due:
            due = time.monotonic() + LINE_EVERY
            progress.console.print(f"warm start: step {step + 1}/{steps}, loss {total:.3f}")
    return model


def write_prompts(folder: Path, demo: Demo) -> None:
    for name, count, evaluation in (("train", TRAINING_PROMPTS, False), ("held_out", HELD_OUT_PROMPTS, True)):
        rows = itertools.islice(demo.problems(1, evaluation=evaluation), count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path, console: Console, demo: Demo, *, train: bool) -> None:
    """Fill `cache/` in `folder` atomically, so that a half-made cache is never used."""
    with whole_directory(folder / "cache") as draft:
        console.print(f"writing {TRAINING_PROMPTS} prompts, and {HELD_OUT_PROMPTS} held-out ones")
        write_prompts(draft, demo)
        model = trained(demo, console) if train else starting_model(demo)
        console.print(f"writing the model and its tokenizer to {folder / 'cache'}")
        disable_progress_bar()
        model.save_pretrained(draft / "model")
        demo.tokenizer().save_pretrained(draft / "model")
        if demo.processor is not None:
            demo.processor().save_pretrained(draft / "model")


def trained(demo: Demo, console: Console) -> PreTrainedModel:
    """A model that `warm_start` trains now."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    if THREADS not in os.environ:
        torch.set_num_threads(share_cores(usable_cores(), 1))
    torch.set_float32_matmul_precision("medium")  # oneDNN: twice as fast on CPUs, fp32 results without AMX
    try:
        with Progress(*columns, loss, console=console, disable=not console.is_terminal) as progress:
            return warm_start(progress, demo)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)  # "medium" would make a caller's engine use bfloat16 on AMX


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for another preparation of this directory."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def main(arguments: Sequence[str], demo: Demo | None = None) -> int:
    """`demo` is one that is defined elsewhere; None: `--task` names it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory that `cache/` is made in")
    parser.add_argument("--task", choices=DEMOS, default="sort", help="what the model is to learn")
    parser.add_argument("--force", action="store_true", help="make everything again, and train the model (minutes)")
    given = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cache = given.folder / "cache"
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
        with _alone(given.folder):
            if cache.exists() and not given.force:
                console.print(f"model and prompts: found in {cache} (prepared before)")
            else:
                prepare(given.folder, console, demo or DEMOS[given.task], train=given.force)
    except KeyboardInterrupt:
        console.print("given up: nothing was written")
        return ExitCode.INTERRUPTED
    except OSError as error:
        console.print(f"error: {error.filename or given.folder}: {error.strerror or error}")
        return ExitCode.CANNOT_CREATE
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
