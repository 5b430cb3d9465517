"""A learner that publishes versions of the tiny model, prompts from files, and an engine that fails as told."""

import asyncio
import contextlib
import unittest.mock

import numpy as np
import torch
from producer_kit import Hands, tiny_model, until

from streamrl.config import SourceConfig
from streamrl.producers.admission import AdmissionTerms, Admitter
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.engines import hf
from streamrl.producers.tokenizer import Tokenizer
from streamrl.producers.worker import run_rollout
from streamrl.weight_sync.publisher import Publisher


class Learner:
    """Publishes versions of the tiny model: version N has the weights of seed N."""

    @classmethod
    async def of(cls, run, ledgers, version=1):
        """A learner that has the ledger to itself, and has published a first version (None: not yet)."""
        made = cls()
        made.hands = await Hands(ledgers.train).fence()
        made.publisher = Publisher(run.config.weights, run.config.name, run.run_dir)
        if version is not None:
            await made.publish(version)
        return made

    async def publish(self, version, seed=None):
        tensors = dict(tiny_model(version if seed is None else seed).named_parameters())
        data = await asyncio.to_thread(
            self.publisher.publish, epoch=1, version=version, step=version, tensors=tensors.items()
        )
        await self.hands.ledger.finish_step(self.hands.nonce, 0, version, data)


@contextlib.asynccontextmanager
async def replica_on(run, ledgers, wrap=lambda engine: engine):
    """A rollout worker whose own engine a test has its hands on: that, the role, and its task."""
    made = []

    def wrapped(config, seed, make=hf.HfEngine):
        made.append(wrap(make(config, seed)))
        return made[-1]

    role = run.role("rollout.0", ledgers)
    with unittest.mock.patch.object(hf, "HfEngine", wrapped):
        task = asyncio.create_task(run_rollout(role))
        await until(lambda: made or task.done())
    try:
        yield made[0], role, task
    finally:
        role.stop.set()
        await asyncio.wait([task], timeout=20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def with_model(engine, work):
    """An engine of which `work` gets the model, as soon as it has one."""
    start = engine.start

    async def started():
        await start()
        work(engine._decoder._batch.model)

    engine.start = started
    return engine


async def admit(run, ledger, count, samples=2):
    config = run.config
    source = SourceConfig(source=run.held_out if ledger.evaluation else run.train)
    limits, tokenizer = PromptLimits(16, config.model.context), Tokenizer.load(config.model)
    data = load_prompts([source], tokenizer, limits, evaluation=ledger.evaluation)
    admitter = Admitter(
        ledger, AdmissionTerms("f", samples, 1, 1000, 1000, 1000), lambda group_id: data.prompts[group_id % len(data)]
    )
    await admitter.locate()
    await admitter.admit(1, limit=count)


async def samples_of(ledger, group_id):
    """Samples that are in the hash of a group."""
    fields = await ledger.connection.read("HGETALL", ledger.keys.group(group_id))
    pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
    return {int(key[2:]): value for key, value in pairs if key.startswith(b"s:")}


async def emitted(ledger, count):
    return sum([len(await samples_of(ledger, group_id)) for group_id in await ledger.oldest_live(100)]) >= count


def check_sample(model, prompt, sample):
    """Log-probabilities are those of a plain forward pass, the text is the decoded ids, one version made it all."""
    ids = torch.tensor([[*prompt.token_ids.tolist(), *sample.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0].numpy()
    np.testing.assert_allclose(sample.token_logprobs, expected, atol=1e-5)
    assert (sample.finish, sample.engine) == ("length", "rollout.0")
    assert len(sample.runs) == 1
    printable = [chr(token) for token in sample.token_ids.tolist() if 32 <= token < 127 or token == 10]
    assert [character for character in sample.text if character != " "] == [c for c in printable if c != " "]


class Faulty:
    """A real engine whose `generate` fails as told; what else it does is the real thing."""

    def __init__(self, engine, faults):
        self._engine = engine
        self._faults = faults
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        self.calls += 1
        fault = self._faults.pop(0) if self._faults else None
        if fault is not None:
            raise fault
        return await self._engine.generate(request)

    async def health(self):
        await self._engine.health()
