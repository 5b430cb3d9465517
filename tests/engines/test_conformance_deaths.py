"""A server that hangs costs only time: its role ends, the next life has the newest weights, requests wait.

Roles do not look at the kind of a server, and each next life takes half a minute: SGLang hangs. The first life is
the server that the other tests had, and the second one is for those to come. Servers of vLLM are killed and hang in
tests/chaos/test_chaos_engines.py, and played ones in tests/servers/test_role.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from streamrl.config import RunConfig
from streamrl.engine import Completion
from streamrl.errors import Unreachable
from streamrl.queues import Ledgers, open_ledgers, open_role
from streamrl.servers import engine
from streamrl.servers.pool import ServerPool
from streamrl.weight_sync.files import make_token
from streamrl.weight_sync.publisher import Publisher
from tests.engines.conformance_kit import KEY, Bench, HeardServer, prompt
from tests.producers.producer_kit import Hands
from tests.queues.ledger_kit import until_async
from tests.redis_kit import RedisRun

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

RESTART = 300.0


class Run:
    """A run with Redis, a learner's hands, and a pool as a rollout worker has it; its engine is that of a bench."""

    _life: asyncio.Task[None]

    def __init__(self, bench: Bench, config: RunConfig, redis: RedisRun, ledgers: Ledgers, pool: ServerPool) -> None:
        self.bench, self.config, self.ledgers, self.pool = bench, config, ledgers, pool
        self._run_dir = redis.run_dir
        self._publisher = Publisher(config.weights, config.name, redis.run_dir)
        self._hands = Hands(ledgers.train)

    async def begin(self) -> None:
        await self._hands.fence()
        await self.publish()

    async def publish(self) -> int:
        """Publish weights under the next number; the bench knows them, and they are its newest."""
        number = self.bench.newest + 1
        self.bench.known(number)
        tensors = self.bench.weights[number].items()
        data = await asyncio.to_thread(self._publisher.publish, epoch=1, version=number, step=number, tensors=tensors)
        await self._hands.ledger.finish_step(self._hands.nonce, 0, number, data)
        return number

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[asyncio.Task[None]]:
        """One life of role `engine.0` on the server of the bench, which goes on after a stop at the end."""
        async with open_role("engine.0", self.config, self._run_dir) as role:
            task = self._life = asyncio.create_task(engine.run_engine(role))
            try:
                yield task
            finally:
                role.stop.set()
                await asyncio.wait([task], timeout=60)
                assert task.done()

    async def bury(self) -> None:
        """End what is left of the server; the one that the next life starts is the engine of the bench from now on."""
        self.bench.server.kept = False
        await self.bench.server.close()
        self.bench.engine = HeardServer(self.bench.config, self.bench.folder, "engine.0", seed=8)
        self.bench.server.kept = True

    async def announced(self) -> None:
        """Wait until the pool knows the engine with the newest version."""

        async def knows() -> bool:
            if self._life.done():
                self._life.result()
            load = self.pool.load()
            return (load.version, load.servers) == (self.bench.number, 1)

        await until_async(knows, RESTART)

    async def sampling(self, count: int) -> None:
        """Wait until the server has sampled something for so many requests."""

        async def samples() -> bool:
            figures = await self.bench.server.metrics()
            return figures.running == count and figures.cache_use > 0

        await until_async(samples)

    def ask(self, seed: int, limit: int) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.pool.generate(self.bench.request(prompt(seed), limit)))

    def strike(self, blow: signal.Signals) -> None:
        """Hit the server and all that it has started."""
        process = self.bench.server.process
        assert process is not None
        assert process.pid is not None
        os.killpg(process.pid, blow)


@pytest.fixture
def run_config(bench: Bench, redis_run: RedisRun) -> RunConfig:
    weights = bench.config.weights.model_copy(update={"transport": "directory", "deadline": 10.0})
    return bench.config.model_copy(update={"redis": redis_run.config, "weights": weights})


@contextlib.asynccontextmanager
async def run_of(
    bench: Bench, config: RunConfig, redis_run: RedisRun, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    def server(*_: object, announce, **__: object) -> HeardServer:
        bench.server.told = announce
        return bench.server

    monkeypatch.setattr(engine, "Server", server)
    make_token(redis_run.run_dir)
    bench.server.kept = True
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        pool = ServerPool(config, ledgers, KEY)
        pool._patience = RESTART  # a worker would give its prompts back, and take them again
        async with pool.follow():
            run = Run(bench, config, redis_run, ledgers, pool)
            await run.begin()
            yield run
            bench.server.told = None


@pytest.mark.parametrize("running", ["sglang"], indirect=True)
async def test_a_server_that_hangs_in_an_update_is_replaced_by_one_that_samples_all_again_with_the_new_weights(
    bench: Bench, run_config: RunConfig, redis_run: RedisRun, monkeypatch: pytest.MonkeyPatch
):
    async with run_of(bench, run_config, redis_run, monkeypatch) as run:
        async with run.life() as dying:
            await run.announced()
            asked = [run.ask(index, 1200) for index in range(6)]
            await run.sampling(6)
            run.strike(signal.SIGSTOP)
            began = time.monotonic()
            number = await run.publish()
            with pytest.raises(Unreachable):
                await asyncio.wait_for(asyncio.shield(dying), 120)
            assert time.monotonic() - began < 2 * run_config.weights.deadline
        late = run.ask(7, 32)
        assert not any(task.done() for task in asked)
        await run.bury()
        async with run.life(), asyncio.timeout(RESTART):
            assert bench.judge(prompt(7), await late) == [(0, 32, number)]
            for index, one in enumerate(await asyncio.gather(*asked)):
                assert (one.finish, bench.judge(prompt(index), one)) == ("length", [(0, 1200, number)])
            assert run.pool.figures()["lost_calls"] >= 6
