"""A tiny reward model with random weights that any server loads, and the forward pass of transformers as its judge."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from streamrl import wire
from streamrl.config import RewardModelConfig, RunConfig
from streamrl.errors import ExitCode
from streamrl.queues import Ledger, Ledgers, open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.runtime.instance import RoleState
from streamrl.runtime.plan import plan
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.servers.reward_models import model_server
from tests.consumers.samples import prompt, response
from tests.engines import tiny
from tests.queues.ledger_kit import admit, lease
from tests.runtime.test_supervisor import Run

CONTEXT = 512
START = 900.0
"""Seconds in which a server starts, however busy the machine is."""
SAMPLES = 4
FLAGS: dict[str, dict[str, Any]] = {
    "vllm": {"dtype": "float32", "max-model-len": CONTEXT, "kv-cache-memory-bytes": 64 << 20},
    "sglang": {"dtype": "float32", "context-length": CONTEXT, "max-total-tokens": 1 << 14},
}
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


def make_critic(folder: Path, seed: int = 0, labels: int = 1) -> Path:
    """Write configuration, weights in float32, tokenizer (one token per byte) and chat template into `folder`.

    A Llama: SGLang gives the head of a Qwen a bias that no checkpoint has, drawn at random by each server. Heads of 32
    values: vLLM on a CPU takes no smaller ones.
    """
    import transformers

    tiny.make_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        num_labels=labels,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.endswith("norm.weight"):  # far enough apart that scores differ by much more than rounding
                tensor.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def managed(kind: str, folder: str) -> ManagedServer:
    """A server with the model in `folder/critic`, not yet started."""
    model = str(Path(folder) / "critic")
    config = RewardModelConfig(kind=kind, model=model, flags=FLAGS[kind], variables={"OMP_NUM_THREADS": "1"})
    settings = ServerSettings("reward_models", model, START, RunConfig().supervisor, config.variables)
    return ManagedServer(model_server("critic", config), settings, Path(folder), "server", seed=7)


def write_run(folder: Path, reward: dict[str, Any], critic: dict[str, Any], **worker: Any) -> RunConfig:
    """A run in `folder/run` with one reward, which asks servers of its own with the model in `folder/critic`."""
    critic |= {"model": str(folder / "critic"), "start_deadline": START, "variables": {"OMP_NUM_THREADS": "1"}}
    config = RunConfig.model_validate(
        {
            "name": "rewarded",
            "rewards": [reward | {"args": {"model": "critic", **reward.get("args", {})}}],
            "reward_models": {"critic": {"flags": FLAGS[critic["kind"]], **critic}},
            "reward_worker": {"concurrency": 8, "deadline": 60.0, **worker},
            "redis": {"maxmemory": 256 << 20},
            "lease": {"seconds": 10.0},
        }
    )
    (folder / "run").mkdir()
    save(LoadedConfig(config=config, origins={}), folder / "run" / "run.json")
    return config


@contextlib.asynccontextmanager
async def scoring(config: RunConfig, run_dir: Path) -> AsyncIterator[tuple[Run, Ledgers]]:
    """Redis, servers and reward workers of a run, from the first worker that takes samples to the end by Ctrl-C."""
    units = [unit for unit in plan(config, run_dir) if unit.kind in {"redis", "reward_model", "reward"}]
    async with Run(run_dir, *units) as run:
        await run.until(lambda: run.now("reward.0") is RoleState.READY, START)
        async with open_ledgers(config, run_dir) as ledgers:
            yield run, ledgers
        os.kill(os.getpid(), signal.SIGINT)
        assert (await run.outcome(120)).exit_code == ExitCode.OK


def question(group_id: int) -> str:
    """The prompt of a group."""
    return f"What is {group_id} + {group_id}?"


def answer(group_id: int, sample: int) -> str:
    """A response to it."""
    return f"It is {2 * group_id + sample}" + "." * sample


async def put(ledger: Ledger, group_id: int) -> None:
    """Admit a group whose responses wait for their scores."""
    await admit(ledger, group_id, samples=SAMPLES, prompt=wire.encode(prompt(text=question(group_id))))
    (held,) = await lease(ledger, "prompts")
    for sample in range(SAMPLES):
        assert await ledger.emit(held, sample, wire.encode(response(answer(group_id, sample))))


class Judge:
    """The same model by transformers alone."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def score(self, prompt: str, response: str) -> float:
        """The number of a response to a prompt, of a model with one."""
        (number,) = self.numbers(prompt, response)
        return number

    @torch.no_grad()
    def numbers(self, prompt: str, response: str) -> list[float]:
        """The numbers of a response to a prompt, each as a turn of the model's own chat template."""
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        numbers: list[float] = self._model(input_ids=torch.tensor([ids])).logits[0].tolist()
        return numbers
