"""A run with hands instead of roles: leases, answers, scores and consumes by the scripts of the real ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import orjson
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from streamrl.config import RunConfig
from streamrl.queues import Lease, Role, open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.wire import Prompt, Sample, SampleScore, decode, encode, pack_float32, pack_int32
from tests.forked import fork


def save_tokenizer(folder):
    """One token per character of ASCII."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{chr(code): code for code in range(32, 127)}, "\n": 10}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def tiny_model(seed=0):
    """A Qwen2 of 50 thousand random parameters that never ends a response by itself."""
    import torch

    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def write_prompts(path, count, letter="p"):
    path.write_bytes(b"".join(orjson.dumps({"prompt": f"{letter}{n}", "answer": str(n)}) + b"\n" for n in range(count)))
    return path


class Run:
    """A run directory with a configuration; makes roles for this process and starts real ones."""

    def __init__(self, redis_run, model_dir, tmp_path):
        self.redis_run = redis_run
        self.run_dir = redis_run.run_dir
        self.run_dir.mkdir(exist_ok=True)
        self.train = write_prompts(tmp_path / "train.jsonl", 5)
        self.held_out = write_prompts(tmp_path / "held_out.jsonl", 6, "h")
        self.overrides = {
            "name": "t",
            "redis": redis_run.config.model_dump(),
            "model": {"path": str(model_dir), "context": 64},
            "data": {"train": self.train, "max_prompt_tokens": 16, "epochs": 2},
            "sampling": {"group_size": 2, "min_group": 1, "max_new_tokens": 8},
            "learner": {"groups_per_step": 2},
            "lease": {"seconds": 0.6},
            "weights": {"transport": "directory"},
        }

    def set(self, section, **values):
        """Change one section of the configuration, or with `None` the top."""
        target = self.overrides if section is None else self.overrides.setdefault(section, {})
        target.update(values)
        return self

    def evaluate(self, **values):
        self.set("data", held_out=self.held_out)
        return self.set("evaluation", **{"every": 1, "prompts": 4, **values})

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.overrides)

    @contextlib.asynccontextmanager
    async def open(self):
        async with open_ledgers(self.config, self.run_dir) as ledgers:
            yield ledgers

    def role(self, name, ledgers):
        return Role(name, self.config, self.run_dir, ledgers)

    @contextlib.asynccontextmanager
    async def running(self, coroutine, name, ledgers, *, stop=True):
        """Run a role's coroutine in this process; at the end stop it and wait for it."""
        role = self.role(name, ledgers)
        task = asyncio.create_task(coroutine(role))
        try:
            yield role, task
        finally:
            if stop:
                role.stop.set()
                await asyncio.wait_for(task, 30)
            elif not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def spawn(self, coroutine, name):
        """Start a role as a process of its own."""
        save(LoadedConfig(config=self.config, origins={}), self.run_dir / "run.json")
        return fork(coroutine, self.run_dir, name)


class Hands:
    """Does by hand what replicas, reward workers and the learner do, on one ledger."""

    def __init__(self, ledger, weights=None):
        self.ledger = ledger
        self.version = 0
        self.nonce = os.urandom(8).hex()
        self.prompts = {}

    async def lease(self, stream):
        reply = await self.ledger.connection.block(
            "XREADGROUP", "GROUP", "g", "hands", "COUNT", 1000, "BLOCK", 1, "STREAMS", stream, ">", milliseconds=1
        )
        rows = next(iter(reply.values())) if isinstance(reply, dict) and reply else []
        rows = rows[0] if rows and rows[0] and isinstance(rows[0][0], list) else rows
        leases = []
        for entry, flat in rows:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            sample = int(fields[b"k"]) if b"k" in fields else None
            leases.append(Lease(self.ledger, entry.decode(), int(fields[b"g"]), int(fields[b"a"]), sample, 1))
        return leases

    async def answer(self, version=1):
        """Answer every prompt that waits; remember which prompt each group had."""
        leases = await self.lease(self.ledger.keys.prompts)
        for lease in leases:
            work = await self.ledger.open_work(lease)
            self.prompts.setdefault(lease.group_id, []).append(decode(work.prompt, Prompt).text)
            for sample in work.missing:
                await self.ledger.emit(lease, sample, payload(version))
        return [lease.group_id for lease in leases]

    async def score(self, value=lambda group_id, sample: 1.0):
        leases = await self.lease(self.ledger.keys.rollouts)
        for lease in leases:
            found = value(lease.group_id, lease.sample)
            if found is None:
                await self.ledger.fail_score(lease, "no score")
            else:
                await self.ledger.score(lease, encode(SampleScore(value=found)))
        return len(leases)

    async def fence(self):
        await self.ledger.fence(self.nonce, 0)
        return self

    async def step(self):
        """Answer, score, train and retire everything that is there, and publish one more version."""
        await self.answer(self.version)
        await self.score()
        await self.publish()
        return await self.retire()

    async def publish(self):
        self.version += 1
        await self.ledger.finish_step(self.nonce, len(await self.ledger.closed()), self.version, b"{}")

    async def retire(self):
        return await self.ledger.retire(self.nonce, "1-1", 0, await self.ledger.closed())


def payload(version):
    return encode(
        Sample(
            tokens=pack_int32([65, 66]),
            logprobs=pack_float32([-1.0, -2.0]),
            runs=[(0, version), (1, version + 1)],
            finish="length",
            text="AB",
        )
    )


async def until(check, seconds=30.0):
    """Wait until an (async) check holds."""
    end = time.monotonic() + seconds
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)
