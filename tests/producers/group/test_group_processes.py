"""Real servers in processes of their own, killed in the middle of what they do."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from producer_kit import tiny_model as model_of
from producer_kit import until

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.producers.group.group import EngineGroup, ServerSpec
from streamrl.producers.group.server import ServerEngine
from streamrl.servers.native import NativeDialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Processes:
    """A group of two servers of a tiny model that streamrl starts, and the weights of seed N as version N."""

    def __init__(self, model_dir, run_dir):
        self.config = RunConfig.model_validate(
            {
                "name": "t",
                "model": {"path": str(model_dir), "context": 1024},
                "sampling": {"max_new_tokens": 900, "group_size": 4},
                "engine": {"slots": 8, "threads": 1, "device": "cpu", "stream_interval": 8},
                "weights": {"transport": "directory", "deadline": 30},
                "supervisor": {"backoff": 0.01, "max_backoff": 0.1},
            }
        )
        self.run_dir = run_dir
        self.publisher = Publisher(self.config.weights, "t", run_dir)
        self.servers = {}
        self.group = EngineGroup(self.config, [self.spec(f"server{number}") for number in range(2)])

    def spec(self, name):
        def make():
            dialect = NativeDialect(self.config)
            seed = len(self.servers.setdefault(name, []))
            server = ManagedServer(dialect, ServerSettings.of_engine(self.config), self.run_dir, name, seed=seed)
            self.servers[name].append(server)
            return ServerEngine(dialect, self.config, server=server)

        return ServerSpec(name, make, ours=True)

    def version(self, number):
        data = self.publisher.publish(epoch=1, version=number, step=number, tensors=model_of(number).named_parameters())
        manifest = decode(data)
        return map_version(self.publisher.root / manifest.folder, manifest)

    def kill(self, name):
        os.killpg(self.servers[name][-1].pid, signal.SIGKILL)

    def ask(self, count, limit):
        requests = [Request(f"r{at}", np.asarray([65, 66 + at], np.int32), limit) for at in range(count)]
        return requests, [asyncio.create_task(self.group.generate(request)) for request in requests]


def check(request, done):
    """Every token has the log-probability of the version that it claims."""
    ids = torch.tensor([[*request.tokens.tolist(), *done.tokens.tolist()]])
    starts = [*(first for first, _ in done.runs), len(done.tokens)]
    for (first, number), end in zip(done.runs, starts[1:], strict=True):
        if len(done.runs) > 1 and first:
            break  # behind a swap the keys and values of older weights are kept
        with torch.no_grad():
            logits = model_of(number).eval()(ids).logits[0, len(request.tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(request.tokens) :, None])[:, 0].numpy()
        np.testing.assert_allclose(done.logprobs[first:end], expected[first:end], atol=1e-4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tiny_dir, tmp_path_factory):
    """Both tests share it: each leaves two servers that are well, and goes on with the next version."""
    torch.set_num_threads(1)
    made = Processes(tiny_dir, tmp_path_factory.mktemp("run"))
    await made.group.start()
    await until(lambda: made.group.load().servers == 2, 60)
    yield made
    await made.group.close()


async def test_kill_9_costs_only_time(processes):
    group = processes.group
    await group.apply(processes.version(1))
    requests, tasks = processes.ask(8, 600)
    await until(lambda: group.load().running == 8 and group.load().tokens_sampled > 400)
    on_first = [row["in_flight"] for row in group.rows().values()]
    assert on_first == [4, 4]
    processes.kill("server0")
    # what it had gone on with goes on elsewhere at once
    await until(lambda: group.rows()["server1"]["in_flight"] == 8)
    done = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for request, completion in zip(requests, done, strict=True):
        assert (len(completion.tokens), completion.finish) == (600, "length")
        assert completion.runs == [(0, 1)]
        check(request, completion)
    assert len({tuple(completion.tokens.tolist()) for completion in done}) == 8
    await group.apply(processes.version(2))
    await until(lambda: group.load().servers == 2, 60)
    assert len(processes.servers["server0"]) == 2
    assert {row["version"] for row in group.rows().values()} == {2}
    requests, tasks = processes.ask(8, 20)
    for request, task in zip(requests, tasks, strict=True):
        completion = await asyncio.wait_for(task, 60)
        assert completion.runs == [(0, 2)]
        check(request, completion)


async def test_both_die_while_weights_change_and_every_response_ends(processes):
    group = processes.group
    await group.apply(processes.version(3))
    requests, tasks = processes.ask(6, 900)
    before = group.load().tokens_sampled
    await until(lambda: group.load().tokens_sampled > before + 300)
    await group.apply(processes.version(4))
    processes.kill("server0")
    processes.kill("server1")
    await until(lambda: group.load().servers == 0)
    await group.apply(processes.version(5))  # nobody is there to take it
    done = await asyncio.wait_for(asyncio.gather(*tasks), 90)
    for request, completion in zip(requests, done, strict=True):
        numbers = [number for _, number in completion.runs]
        assert len(completion.tokens) == 900
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == 5
        check(request, completion)
