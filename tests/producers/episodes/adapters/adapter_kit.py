"""One episode of an adapter, with a model that says what the test wants or with a real one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes.sampler import EpisodeSampler
from streamrl.producers.tokenizer import Tokenizer

from ..chat_kit import HERMES, make_tokenizer  # noqa: TID252 (tests are no package)
from ..episode_kit import Script, call, config_of, order_of, save_talker  # noqa: TID252

TOKENIZER = make_tokenizer(HERMES)


def asks(name, arguments="{}"):
    return call(f'{{"name": "{name}", "arguments": {arguments}}}')


def order_with(line=7, answer="3", evaluation=False, text="what is 1 + 2?", **metadata):
    order = order_of(TOKENIZER, text)
    prompt = order.prompt
    fields = {name: getattr(prompt, name) for name in ("tokens", "text", "messages")}
    fields |= {"line": line, "answer": answer, "evaluation": evaluation, "metadata": metadata}
    return replace(order, prompt=type(prompt)(**fields))


class Played:
    """What became of one episode: its sample, and what the model was given."""

    def __init__(self, sample, engine):
        self.sample = sample
        self.rewards = [turn.reward for turn in sample.turns if turn.sampled]
        self.uses = [(use.name, use.outcome) for turn in sample.turns for use in turn.tools]
        self.prompts = [TOKENIZER.backend.decode(request.tokens) for request in engine.requests]


@contextlib.asynccontextmanager
async def opened(episode, said, **settings):
    """A sampler of an episode whose model says `said`; play with `await play(order)`."""
    engine = Script(TOKENIZER, said)
    config = config_of({"run": "adapters:Under_test", "max_turns": 8, **settings}, model={"context": 2048})
    async with EpisodeSampler(config, engine, TOKENIZER, episode) as sampler:

        async def play(order=None):
            return Played(await sampler.sample(order or order_with()), engine)

        yield play


async def played(episode, said, order=None, **settings):
    async with opened(episode, said, **settings) as play:
        return await play(order)


@contextlib.asynccontextmanager
async def real_model(episode, folder, **settings):
    """A sampler with a tiny Hugging Face model that calls tools or answers at random."""
    folder = save_talker(folder)
    config = config_of(
        {"run": "adapters:Under_test", **settings},
        model={"path": str(folder), "context": 1024},
        engine={"slots": 2, "threads": 1},
    )
    engine = HfEngine(config, seed=0)
    await engine.start()
    try:
        tokenizer = Tokenizer.load(config.model)
        async with EpisodeSampler(config, engine, tokenizer, episode) as sampler:
            yield sampler, tokenizer
    finally:
        await engine.close()
