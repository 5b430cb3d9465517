"""A server that dies or hangs costs only time: what it had written is gone on with, under the newest weights.

Who goes on does not look at the kind of a server, and each next life takes half a minute: vLLM is killed, SGLang hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from streamrl.errors import StreamrlError
from tests.engines.conformance_kit import INTERVAL, Bench, prompt

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

LATE = 40
RESTART = 300.0


def strike(bench: Bench, blow: signal.Signals) -> None:
    """Hit the server and all that it has started."""
    pid = bench.servers[-1].pid
    assert pid is not None
    os.killpg(pid, blow)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
async def test_kill_9_in_mid_generation_and_the_next_server_begins_at_version_40(bench: Bench):
    while bench.number < LATE:
        await bench.apply()
    lives = len(bench.servers)
    begun = [bench.begin(prompt(index), 1200) for index in range(6)]
    for _, heard, _ in begun:
        await heard.at_least(2 * INTERVAL)
    early = [list(heard.tokens) for _, heard, _ in begun]
    strike(bench, signal.SIGKILL)
    late, _, _ = bench.begin(prompt(7), 32)
    async with asyncio.timeout(RESTART):
        done = await asyncio.gather(*(task for task, _, _ in begun))
        assert bench.judge(prompt(7), await late) == [(0, 32, bench.number)]
    assert len(bench.servers) == lives + 1
    for index, one in enumerate(done):
        assert (one.finish, bench.judge_apart(prompt(index), one)) == ("length", [(0, 1200, bench.number)])
        assert one.tokens.tolist() == begun[index][1].tokens, "each token is heard once"
        assert one.tokens.tolist()[: len(early[index])] == early[index], "what it had written stays"


@pytest.mark.parametrize("running", ["sglang"], indirect=True)
async def test_a_server_that_hangs_in_an_update_is_replaced_by_one_with_the_new_weights(bench: Bench):
    await bench.prepare(1)
    before, tokens, lives = bench.number, prompt(8), len(bench.servers)
    begun = bench.begin(tokens)
    heard = begun[1]
    await heard.at_least(2 * INTERVAL)
    strike(bench, signal.SIGSTOP)
    async with asyncio.timeout(RESTART):
        try:
            after = await bench.apply()
        except StreamrlError:  # its only server died of it
            after = bench.newest
        bench.number = after
        assert bench.judge(tokens, await bench.generate(tokens, 32)) == [(0, 32, after)]
        await heard.at_least(len(heard.tokens) + 2 * INTERVAL)
    assert len(bench.servers) == lives + 1
    done = await bench.end(begun)
    assert [version for *_, version in bench.judge_apart(tokens, done)] == [before, after]
    assert done.runs[1][0] >= 2 * INTERVAL
