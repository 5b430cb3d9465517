"""A sample behind an endpoint, with an engine that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import aiohttp
import msgspec
from openai import AsyncOpenAI

from streamrl.producers.episodes.endpoint.door import AgentDoor
from streamrl.producers.episodes.endpoint.server import AgentEndpoint
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.episodes.session import EpisodeSession

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import Script, config_of, order_of

TOKENIZER = make_tokenizer(HERMES, eos="<|im_end|>")
ASKED = [{"role": "user", "content": "what is 1 + 2?"}]


class Gated(Script):
    """Counts requests that came in; while `open` is not set, they wait."""

    def __init__(self, tokenizer, texts):
        super().__init__(tokenizer, texts)
        self.open = asyncio.Event()
        self.open.set()
        self.came = asyncio.Condition()

    async def generate(self, request):
        completion = await super().generate(request)
        async with self.came:
            self.came.notify_all()
        await self.open.wait()
        return completion

    async def until(self, count):
        """Wait until so many requests have come."""
        async with asyncio.timeout(10), self.came:
            await self.came.wait_for(lambda: len(self.requests) >= count)


class Served:
    """One sample: `engine`, `session`, `door`, the `url` and `key` of its endpoint, and a `client` without retries."""

    def __init__(self, texts, tokenizer=TOKENIZER, *, sections=(), evaluation=False, engine=None, **episode):
        agent = {"command": "agent", **episode.pop("agent", {})}
        config = config_of({"agent": agent, **episode}, **dict(sections))
        order = order_of(tokenizer)
        order = replace(order, prompt=msgspec.structs.replace(order.prompt, evaluation=evaluation))
        self.engine = engine or Gated(tokenizer, texts)
        self.session = EpisodeSession(config, self.engine, renderer_of(tokenizer), tokenizer, order)
        agent = config.episode.agent
        self.door = AgentDoor(self.session, agent.max_calls, config.model.context, agent.ignore)

    @contextlib.asynccontextmanager
    async def open(self):
        async with AgentEndpoint.open("127.0.0.1") as endpoint:
            self.url = endpoint.url
            with endpoint.serving(self.door) as self.key:
                async with self.made() as self.client:
                    yield self
            # the client of the key outlives the sample
            await self.door.close()

    def made(self, key=None, **options):
        key = self.key if key is None else key
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 10, **options})

    async def ask(self, messages=ASKED, client=None, **options):
        return await (client or self.client).chat.completions.create(model="any", messages=messages, **options)

    async def said(self):
        """The texts of the sampled turns that are left after the end, and those of the observed ones."""
        await self.door.close()
        sample = self.session.sample()
        if not sample.turns:
            return [sample.text], []
        tokens, at, sampled, observed = sample.token_ids.tolist(), 0, [], []
        for turn in sample.turns:
            if turn.sampled:
                sampled.append(TOKENIZER.decode(tokens[at : at + turn.sampled]))
                at += turn.sampled
            else:
                observed.append(TOKENIZER.decode(turn.observed_ids.tolist()))
        return sampled, observed


async def post(served, body, path="chat/completions", **headers):
    """Status and body of the answer to a raw client."""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {served.key}", **headers}) as client,
        client.post(f"{served.url}/v1/{path}", json=body) as response,
    ):
        return response.status, await response.json()
