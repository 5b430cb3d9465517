"""What the attempts for one sample remember of each other, and nobody else does."""

import asyncio

from streamrl.consumers.calls import failed_servers
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.samples import seen


async def test_the_attempts_for_one_sample_know_who_failed_it_and_other_samples_do_not():
    known = []

    async def fails(url):
        failed_servers()[url] = None

    async def reward(sample):
        known.append((sample.text, list(failed_servers())))
        await asyncio.gather(fails("a"), fails("b"))  # as the requests for several votes
        if sum(text == sample.text for text, _ in known) < 3:
            raise ValueError("not yet")
        return 1.0

    calls = calls_of(loaded(reward, attempts=3))
    await asyncio.gather(*(calls.score(seen(text), leased()) for text in ("one", "two")))
    assert sorted(known) == [(text, failed) for text in ("one", "two") for failed in ([], ["a", "b"], ["a", "b"])]
    assert failed_servers() == {}, "nothing is left of them"
