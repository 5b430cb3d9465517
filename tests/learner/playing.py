"""Plays feeder, rollout replica and reward worker at once, with a real ledger and made-up responses."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl import wire
from streamrl.config import (
    CheckpointConfig,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
    WeightsConfig,
)
from streamrl.queues import replies
from streamrl.queues.keys import GROUP
from streamrl.queues.ledger import Lease, Ledger
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.records import AdmitOutcome
from streamrl.runfile import LoadedConfig, save

VOCABULARY = 32
FINGERPRINT = "played"


def make_model(folder: Path, seed: int = 0) -> Path:
    """A causal language model of a few thousand parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_config(redis: RedisConfig, model: Path, run_dir: Path, **learner) -> RunConfig:
    """A small run; writes `run.json`."""
    settings = {
        "groups_per_step": 4, "steps": 6, "threads": 1, "device": "cpu", "tokens_per_microbatch": 64, "lr": 1e-3,
        "collective_deadline": 30.0, **learner,
    }  # fmt: skip
    every, epochs = settings.pop("checkpoint_every", 2), settings.pop("epochs", 1)
    greedy = settings.get("advantage", {}).get("use") == "remax"
    weights = {"transport": "directory", **settings.pop("weights", {})}
    config = RunConfig(
        name="played",
        redis=redis,
        model=ModelConfig(path=str(model), context=64),
        data=DataConfig(epochs=epochs),
        sampling=SamplingConfig(group_size=3, min_group=2, max_new_tokens=8, greedy_baseline=greedy),
        learner=LearnerConfig(**settings),
        checkpoint=CheckpointConfig(every=every),
        weights=WeightsConfig(**weights),
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
    return config


def response(group_id: int, sample: int, version: int, greedy: bool = False) -> wire.Sample:
    """A made-up response, a function of its group and number."""
    chance = random.Random(f"{group_id} {sample}")
    count = chance.randint(1, 8)
    return wire.Sample(
        tokens=wire.pack_int32([chance.randrange(VOCABULARY) for _ in range(count)]),
        logprobs=wire.pack_float32([-chance.uniform(2.5, 4.5) for _ in range(count)]),
        runs=[(0, version)],
        finish="stop",
        greedy=greedy,
    )


def reward(group_id: int, sample: int) -> float:
    """Some groups have equal rewards, so that zero advantages occur."""
    return float(random.Random(f"r {group_id} {sample}").randint(0, 1)) if group_id % 4 else 1.0


class Player:
    """Admits groups while there is room and closes them at once.

    Args:
        end: cursor at which the data ends; None: never.
        spoil: payloads to write instead, by (group_id, sample).
    """

    def __init__(self, ledgers: Ledgers, config: RunConfig, end: int | None = None, spoil=None) -> None:
        self.ledger: Ledger = ledgers.train
        self.config, self.end, self.spoil = config, end, spoil or {}
        self.open_only: set[int] = set()
        self.working = asyncio.Lock()
        self.cursor = 0

    async def run(self) -> None:
        while True:
            async with self.working:
                admitted = await self.once()
            if not admitted:
                await asyncio.sleep(0.01)

    async def once(self) -> bool:
        """Admit what there is room for and work on everything that is open."""
        await self.ledger.ensure()
        admitted = await self.admit()
        for entry, fields in await self._take(self.ledger.keys.prompts):
            group_id = int(fields[b"g"])
            if group_id not in self.open_only:
                await self._generate(Lease(self.ledger, entry, group_id, int(fields[b"a"]), None, 1))
        for entry, fields in await self._take(self.ledger.keys.rollouts):
            group_id, sample = int(fields[b"g"]), int(fields[b"k"])
            lease = Lease(self.ledger, entry, group_id, int(fields[b"a"]), sample, 1)
            if await self.ledger.leased_sample(lease) is not None:
                await self.ledger.score(lease, wire.encode(wire.SampleScore(value=reward(group_id, sample))))
        return admitted

    async def admit(self, limit: int | None = None) -> bool:
        """Admit until there is no room, at most `limit`."""
        config, state = self.config, await self.ledger.state()
        cursor, admitted = state.cursor, 0
        self.cursor = cursor
        while cursor != self.end and admitted != limit:
            prompt = wire.Prompt(tokens=wire.pack_int32([1 + cursor % (VOCABULARY - 1), 2, 3]), line=cursor)
            answer = await self.ledger.admit(
                cursor=cursor, fingerprint=FINGERPRINT, prompt=wire.encode(prompt), samples=config.sampling.responses,
                min_group=config.sampling.min_responses, budget=config.budget, hard_cap=config.hard_cap,
                max_dead=config.max_dead, version=state.version,
            )  # fmt: skip
            cursor = answer.cursor
            admitted += answer.outcome is AdmitOutcome.ADMITTED
            if answer.outcome not in {AdmitOutcome.ADMITTED, AdmitOutcome.MOVED}:
                break
        if cursor == self.end:
            await self.ledger.finish(self.end, config.data.epochs)
        return admitted > 0

    async def _generate(self, lease: Lease) -> None:
        work = await self.ledger.open_work(lease)
        version = (await self.ledger.state()).version
        for sample in work.missing if work else ():
            payload = self.spoil.get((lease.group_id, sample))
            if payload is None:
                greedy = sample >= self.config.sampling.group_size
                payload = wire.encode(response(lease.group_id, sample, version, greedy))
            await self.ledger.emit(lease, sample, payload)

    async def _take(self, stream: str):
        """Everything that is new, and everything that was taken before and is still there (as after a restart)."""
        read = self.ledger.connection.read
        rows = await read("XREADGROUP", "GROUP", GROUP, "player", "COUNT", 500, "STREAMS", stream, ">")
        await read("XAUTOCLAIM", stream, GROUP, "player", 0, "0", "COUNT", 500)
        del rows
        own = await read("XREADGROUP", "GROUP", GROUP, "player", "COUNT", 500, "STREAMS", stream, "0")
        return replies.streams(own).get(stream, [])
