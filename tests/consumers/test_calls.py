"""The calls of one reward: what is tried again, for how long, how many at a time, and how it ends."""

import asyncio
import math
import time
from dataclasses import replace

import orjson
import pytest

from streamrl.consumers import Reward, Score
from streamrl.consumers import calls as module
from streamrl.consumers import limits as limits_module
from streamrl.consumers.calls import CallThreads, NoTime, ScoringFailed, failed_servers
from streamrl.consumers.limits import FIRST_PAUSE, LONGEST_PAUSE, SAMPLES, Circuit, Slots
from streamrl.consumers.processes import CallFailed
from streamrl.consumers.worker import line_of
from streamrl.errors import DataError, RewardBusy, RewardUnavailable
from tests.consumers.calls_kit import LEASE, calls_of, failing, lease_end, leased, loaded, numbered, scorer
from tests.consumers.samples import seen

HALF = "\ud83d"  # the first half of a character of two, as `json.loads` makes it of what a model wrote


async def outcome(calls, sample=None, state=None):
    (score,) = await calls.score(sample or seen(), state or leased())
    return score.value


async def fine(sample):
    return 1.0


# --- attempts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
async def test_what_is_refused_is_never_tried_again(on_failure):
    reward, made = failing(DataError("no answer in line 3"))
    with pytest.raises(ScoringFailed, match="no answer in line 3") as caught:
        await outcome(calls_of(loaded(reward, on_failure=on_failure, attempts=5)))
    assert len(made) == 1
    assert caught.value.fail_group == (on_failure == "dead")


async def test_attempts_of_the_reward_come_before_those_of_the_worker():
    reward, made = failing(ValueError("no"))
    with pytest.raises(ScoringFailed, match=r"ValueError: no \(4 attempts\) \[reward\]"):
        await outcome(calls_of(loaded(reward, attempts=4), attempts=2))
    assert len(made) == 4


async def test_a_wrapper_that_forgets_to_await_is_awaited_to_its_end():
    async def inner(_sample):
        return 0.5

    async def outer(sample):
        return inner(sample)

    def sync(sample):
        return outer(sample)

    assert [await outcome(calls_of(loaded(call))) for call in (outer, sync)] == [0.5, 0.5]


async def test_retry_goes_on_beyond_the_attempts(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.001)
    reward, made = failing(RuntimeError("starting"), times=20, value=0.5)
    assert await outcome(calls_of(loaded(reward, on_failure="retry"), attempts=1)) == 0.5
    assert len(made) == 21


async def test_a_rule_is_tried_once_whatever_the_keys_say():
    reward, made = failing(ValueError("line 3 has no answer"))
    calls = calls_of(loaded(reward, instant=True, on_failure="dead"), attempts=5)
    with pytest.raises(ScoringFailed, match="no answer") as caught:
        await calls.instant(seen())
    assert len(made) == 1
    assert caught.value.fail_group


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


async def test_figures_count_attempts_values_and_cost():
    given = iter([Score(0.5, tokens=7), ValueError("x"), "text", Score(-1, tokens=3)])

    async def reward(sample):
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    calls = calls_of(loaded(reward), attempts=3)
    assert await outcome(calls) == 0.5
    assert await outcome(calls) == -1.0
    line = calls.figures.line()
    assert (line["ok"], line["failed"]["error"], line["retried"], line["tokens"]) == (2, 2, 2, 10)
    assert line["values"] == {"-1": 1, "0.5": 1}
    assert (line["mean"], line["std"]) == (-0.25, 0.75)
    assert 0 < line["p50"] <= line["p95"]
    assert "p50" not in calls.figures.line(), "quantiles are of what came since the last line"


async def test_a_group_reward_gives_one_score_for_each_sample():
    async def compare(samples):
        return [float(sample.index) for sample in samples]

    calls = calls_of(loaded(compare, group=True))
    scores = await calls.score([numbered(index) for index in range(3)], leased())
    assert [score.value for score in scores] == [0.0, 1.0, 2.0]
    assert calls.figures.ok == 3


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "1 scores for 2 samples"),
        (1.0, "a float, not a sequence"),
        ("ab", "a str"),
        ([1.0, None], "None"),
        (None, "NoneType"),
    ],
)
async def test_a_group_reward_that_returns_something_else_fails(result, message):
    async def compare(samples):
        return result

    with pytest.raises(ScoringFailed, match=message):
        await calls_of(loaded(compare, group=True)).score([numbered(0), numbered(1)], leased())


# --- outages and the lease --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
@pytest.mark.parametrize("error", [RewardUnavailable("all away"), RewardBusy("all busy")])
async def test_an_outage_or_a_queue_spends_no_attempt(monkeypatch, on_failure, error):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.001)
    reward, made = failing(error, times=7, value=0.5)
    calls = calls_of(loaded(reward, on_failure=on_failure, attempts=2), retry_for=0.001)
    calls.circuit.wait = lambda now: 0.0
    assert await outcome(calls) == 0.5
    assert len(made) == 8
    assert calls.figures.dead == 0
    assert calls.figures.failures["unavailable"] == 7
    assert calls.circuit.opened == (type(error) is RewardUnavailable), "a busy service opens no circuit"


async def test_failures_count_as_attempts_whatever_comes_between_them():
    ends = [ValueError("first"), RewardBusy("full"), RewardUnavailable("away"), ValueError("second")]

    async def reward(sample):
        raise ends.pop(0)

    with pytest.raises(ScoringFailed, match=r"second \(2 attempts\)"):
        await outcome(calls_of(loaded(reward), attempts=2))


async def test_retry_ends_with_the_time_of_its_failures_whatever_comes_between_them(monkeypatch):
    clock, passed, failures = time.monotonic, [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + passed[0])

    async def reward(sample):
        if len(failures) % 2:
            failures.append(RewardBusy("full"))
            passed[0] += 500
        else:
            failures.append(ValueError("no"))
            passed[0] += 100
        raise failures[-1]

    with pytest.raises(ScoringFailed, match="no") as caught:
        await outcome(calls_of(loaded(reward, on_failure="retry"), retry_for=350), state=leased(1e6))
    assert len(failures) == 7, "four failures of 100 s, and three waits that do not count"
    assert not caught.value.fail_group


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
async def test_a_sample_that_no_server_could_score_goes_back_before_its_lease_ends(on_failure):
    reward, made = failing(RewardUnavailable("all away"))
    calls = calls_of(loaded(reward, on_failure=on_failure, deadline=0.2, attempts=1))
    state = leased(0.5)
    with pytest.raises(NoTime):
        await outcome(calls, state=state)
    assert made
    assert state.failure is None
    assert (calls.figures.dead, calls.figures.ok) == (0, 0)
    assert calls.figures.failures["unavailable"] >= 1
    assert calls.circuit.opened == 1


async def test_an_outage_after_a_failure_kills_nothing_either():
    ends = [ValueError("once")]

    async def reward(sample):
        raise ends.pop() if ends else RewardUnavailable("away")

    with pytest.raises(RewardUnavailable):
        await outcome(calls_of(loaded(reward, deadline=0.2), attempts=3), state=leased(1.5))


async def test_no_attempt_may_outlast_the_lease_and_then_on_failure_decides():
    reward, made = failing(ValueError("no"))
    calls = calls_of(loaded(reward, on_failure="dead", deadline=LEASE / 2), attempts=1000, backoff=0.001)
    with pytest.raises(ScoringFailed, match=r"ValueError: no \(.*lease.max_hold leaves no time") as caught:
        await outcome(calls, state=leased(LEASE / 2 + 0.5))
    assert caught.value.fail_group
    assert made


async def test_a_sample_that_gets_no_slot_in_time_goes_back():
    running, release = asyncio.Event(), asyncio.Event()

    async def reward(sample):
        running.set()
        await release.wait()
        return 1.0

    calls = calls_of(loaded(reward, concurrency=1, deadline=60))
    first = asyncio.create_task(outcome(calls, numbered(0)))
    await running.wait()
    with pytest.raises(NoTime, match="no free slot"):
        await outcome(calls, numbered(1), leased(60.1))
    release.set()
    assert await first == 1.0


async def test_whole_groups_go_back_too():
    async def compares(samples):
        return [1.0] * len(samples)

    reward, _ = failing(RewardUnavailable("all away"))
    both = scorer(loaded(reward, deadline=0.2), loaded(compares, group=True))
    with pytest.raises(RewardUnavailable):
        await both.score_group([numbered(0), numbered(1)], lease_end(0.5))


# --- slots ------------------------------------------------------------------------------------------------------------


async def test_concurrency_of_a_reward_and_waiting_takes_nothing_from_the_deadline():
    release, running, most = asyncio.Event(), 0, 0

    async def reward(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if sample.index == 0:
            await release.wait()
        running -= 1
        return 1.0

    calls = calls_of(loaded(reward, concurrency=2, deadline=60, attempts=1))
    tasks = [asyncio.create_task(outcome(calls, numbered(index))) for index in range(10)]
    while calls.figures.ok < 9:  # noqa: ASYNC110
        await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*tasks) == [1.0] * 10
    assert most == 2


async def waiting(slots, order, name):
    await slots.acquire(60.0)
    order.append(name)


async def test_slots_are_given_in_the_order_of_coming_and_a_cancelled_waiter_leaves_the_line():
    slots, order = Slots(lambda: 1), []
    await slots.acquire(60.0)
    tasks = []
    for name in range(5):
        tasks.append(asyncio.create_task(waiting(slots, order, name)))
        await asyncio.sleep(0)
    for cancelled in (0, 2):
        tasks[cancelled].cancel()
    await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
    for name in (1, 3, 4):
        slots.release()
        await tasks[name]
    assert order == [1, 3, 4]


async def test_a_slot_that_came_to_a_cancelled_waiter_goes_to_the_next():
    slots, order = Slots(lambda: 1), []
    await slots.acquire(60.0)
    first = asyncio.create_task(waiting(slots, order, "first"))
    second = asyncio.create_task(waiting(slots, order, "second"))
    await asyncio.sleep(0)
    slots.release()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["second"]


async def test_no_slot_in_time_leaves_the_line():
    slots = Slots(lambda: 1)
    await slots.acquire(60.0)
    for seconds in (0.01, -1.0):
        with pytest.raises(TimeoutError):
            await slots.acquire(seconds)
    slots.release()
    await slots.acquire(-1.0)


async def test_more_and_fewer_slots_while_some_are_taken(monkeypatch):
    monkeypatch.setattr(limits_module, "LOOK_SECONDS", 0.01)
    limit, order = 1, []
    slots = Slots(lambda: limit)
    await slots.acquire(60.0)
    tasks = [asyncio.create_task(waiting(slots, order, name)) for name in range(4)]
    await asyncio.sleep(0)
    assert order == []
    limit = 3
    await asyncio.gather(*tasks[:2])
    assert order == [0, 1]
    limit = 1
    slots.release()
    slots.release()
    assert not tasks[2].done()
    slots.release()
    await tasks[2]
    assert order == [0, 1, 2]
    limit = None
    slots.release()
    await tasks[3]


# --- the circuit ------------------------------------------------------------------------------------------------------


async def test_while_the_circuit_is_open_samples_wait_and_one_tries(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(limits_module, "FIRST_PAUSE", 0.01)
    back = asyncio.Event()
    during, together, most = [], 0, 0

    async def reward(sample):
        nonlocal together, most
        during.append(sample.index)
        together += 1
        most = max(most, together)
        await asyncio.sleep(0)
        together -= 1
        if not back.is_set():
            raise RewardUnavailable("starting")
        return 1.0

    calls = calls_of(loaded(reward, on_failure="retry", deadline=60))
    first = asyncio.create_task(outcome(calls, numbered(0)))
    while calls.circuit.open_since is None:  # noqa: ASYNC110 (nobody announces it)
        await asyncio.sleep(0)
    most = 0
    others = [asyncio.create_task(outcome(calls, numbered(index))) for index in range(1, 20)]
    while len(during) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert most == 1, "one at a time while it is open"
    back.set()
    assert await asyncio.gather(first, *others) == [1.0] * 20
    assert calls.circuit.open_since is None
    assert calls.figures.dead == 0


async def test_a_wait_for_the_circuit_ends_with_the_deadline():
    reward, _ = failing(RewardUnavailable("away"))
    calls = calls_of(loaded(reward, deadline=0.05))
    with pytest.raises(RewardUnavailable, match="away"):
        await calls._attempt(numbered(0), lease_end())
    calls.circuit.wait = lambda now: 60.0
    with pytest.raises(RewardUnavailable, match=r"no score for \d+ s: RewardUnavailable: away"):
        await calls._attempt(numbered(0), lease_end())


async def test_a_cancelled_probe_leaves_the_circuit_to_the_next():
    entered, answers = asyncio.Event(), asyncio.Event()

    async def reward(sample):
        if sample.index == 0:
            raise RewardUnavailable("away")
        entered.set()
        await answers.wait()
        return 1.0

    calls = calls_of(loaded(reward))
    with pytest.raises(RewardUnavailable):
        await calls._attempt(numbered(0), lease_end())
    probing = asyncio.create_task(outcome(calls, numbered(1)))
    await entered.wait()
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    answers.set()
    assert await outcome(calls, numbered(2)) == 1.0
    assert calls.in_flight == 0


class HttpError(Exception):
    """As the clients of services have them: of no family."""


@pytest.mark.parametrize(
    ("error", "opened"),
    [
        (KeyError("ground_truth"), 0),
        (CallFailed("jsonschema: ValueError: no"), 0),
        (ConnectionResetError("reset"), 1),
        (HttpError("502"), 1),
        (TimeoutError("of the client"), 1),
    ],
)
async def test_failures_of_a_service_open_the_circuit_and_errors_of_samples_do_not(error, opened):
    reward, _ = failing(error)
    calls = calls_of(loaded(reward, attempts=1))
    for index in range(SAMPLES if opened else 50):
        with pytest.raises(ScoringFailed):
            await outcome(calls, numbered(index))
    assert calls.circuit.opened == opened


@pytest.mark.parametrize("use", ["judge", "reward_model"])
@pytest.mark.parametrize("error", [ConnectionResetError("reset"), RewardUnavailable("all away")])
async def test_failures_of_a_reward_with_a_pool_open_no_circuit(use, error):
    """The pool knows which of its servers are away, and a circuit would keep samples from those that work."""
    reward, made = failing(error)
    calls = calls_of(loaded(reward, use=use, deadline=0.1))
    for index in range(20):
        with pytest.raises(type(error)):
            await calls._attempt(numbered(index), lease_end())
    assert len(made) == calls.figures.failures.total() == 20
    assert calls.circuit.opened == 0


def fail(circuit, now, sample, *, probe=False, unavailable=False):
    circuit.failure(now, sample, f"failure of {sample}", probe=probe, unavailable=unavailable)


@pytest.fixture
def opened():
    circuit = Circuit()
    fail(circuit, 0.0, 0, unavailable=True)
    assert circuit.open_since == 0.0
    return circuit


def test_it_opens_after_so_many_samples_in_a_row():
    circuit = Circuit()
    for sample in range(SAMPLES - 1):
        fail(circuit, 1.0, sample)
    assert (circuit.open_since, circuit.wait(1.0)) == (None, 0.0)
    fail(circuit, 2.0, SAMPLES)
    assert (circuit.open_since, circuit.why, circuit.opened) == (2.0, f"failure of {SAMPLES}", 1)
    assert circuit.wait(2.0) == FIRST_PAUSE


def test_attempts_at_one_sample_count_once_and_a_success_begins_anew():
    circuit = Circuit()
    for _ in range(10 * SAMPLES):
        fail(circuit, 0.0, "poison")
    circuit.success()
    for sample in range(10 * SAMPLES):
        fail(circuit, 0.0, sample)
        if sample % (SAMPLES - 1) == 0:
            circuit.success()
    assert circuit.open_since is None


def test_after_the_pause_one_call_probes_and_its_success_closes(opened):
    assert opened.wait(FIRST_PAUSE / 2) == FIRST_PAUSE / 2
    assert opened.wait(FIRST_PAUSE) == 0
    assert opened.enter()
    assert opened.wait(FIRST_PAUSE) == math.inf, "the others wait for the probe"
    fail(opened, FIRST_PAUSE, "late")
    assert opened.wait(FIRST_PAUSE) == math.inf, "a late failure of a call that began before changes nothing"
    opened.inconclusive(probe=False)
    assert opened.wait(FIRST_PAUSE) == math.inf
    opened.inconclusive(probe=True)
    assert opened.wait(FIRST_PAUSE) == 0, "a probe that was cancelled lets another one try at once"
    assert opened.enter()
    opened.success()
    assert (opened.open_since, opened.wait(FIRST_PAUSE)) == (None, 0.0)
    assert not opened.enter()


def test_a_late_success_closes(opened):
    opened.success()
    assert opened.open_since is None


def test_the_pause_doubles_up_to_a_limit_and_is_short_again_after_a_success(opened):
    now, pauses = 0.0, []
    for sample in range(8):
        pauses.append(opened.wait(now))
        now += pauses[-1]
        fail(opened, now, sample, probe=opened.enter())
    assert pauses == [min(FIRST_PAUSE * 2**k, LONGEST_PAUSE) for k in range(8)]
    opened.success()
    fail(opened, now, "again", unavailable=True)
    assert opened.wait(now) == FIRST_PAUSE


# --- what a reward says of itself -------------------------------------------------------------------------------------


async def test_reasons_are_written_in_utf8():
    async def broken(sample):
        raise ValueError(f"no {HALF}")

    with pytest.raises(ScoringFailed) as caught:
        await outcome(calls_of(loaded(broken)))
    assert "no ?" in caught.value.message
    assert caught.value.detail.encode()
    away, _ = failing(RewardUnavailable(f"no {HALF}"))
    calls = calls_of(loaded(away, deadline=0.2))
    with pytest.raises(RewardUnavailable):
        await outcome(calls, state=leased(0.5))
    assert b"nobody scores: RewardUnavailable: no ?" in orjson.dumps(line_of(calls))
    with pytest.raises(ValueError, match="half a character"):
        Score(1.0, {HALF: 1.0})
    assert Score(1.0, {"gut 👍": 1.0}).parts == {"gut 👍": 1.0}


class Asks(Reward):
    """Answers about itself, one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def away(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    counts = away

    async def score(self, sample):
        return 1.0


def asking(life, **only):
    """The calls of a reward of which only the named methods are of interest."""
    life.__dict__.update(dict.fromkeys({"away", "counts"} - {*only}, dict) | only)
    return calls_of(replace(loaded(life.score), life=life))


def test_a_reward_says_that_its_servers_are_away_before_it_is_asked():
    asks = Asks(f"no {HALF} answers")
    line = line_of(asking(asks, away=asks.away))
    assert (line["away"], line["trouble"]) == (1, "nobody scores: no ? answers")


@pytest.mark.parametrize("answer", [None, "", ZeroDivisionError("no")])
def test_a_reward_that_cannot_say_whether_it_is_away_ends_nothing(answer, caplog):
    asks = Asks(answer, answer)
    calls = asking(asks, away=asks.away)
    assert [line_of(calls)["trouble"] for _ in range(2)] == ["", ""]
    assert len(caplog.records) == isinstance(answer, Exception), "it is not asked again"


async def test_counts_that_fail_are_said_once_and_may_recover(caplog):
    asks = Asks(ZeroDivisionError("no"), ZeroDivisionError("no"), {"seen": 3})
    calls = asking(asks, counts=asks.counts)
    assert [line_of(calls)["trouble"] for _ in range(2)] == ["cannot count: ZeroDivisionError: no"] * 2
    assert [record.message for record in caplog.records] == ["a reward cannot count"]
    assert (line_of(calls)["own"], calls.figures.miscounts) == ({"seen": 3}, "")


class CancelledAsItEnds(CallThreads):
    """The caller is cancelled in the turn of the event loop in which its result arrives, as by a deadline."""

    caller: asyncio.Task[str]

    def _finish(self, *ended):
        super()._finish(*ended)
        self.caller.cancel()


@pytest.mark.parametrize("call", [str, int], ids=["returns", "raises"])
async def test_a_call_that_ends_in_the_turn_of_its_deadline_does_not_count_as_hanging(call):
    threads = CancelledAsItEnds()
    for _ in range(3):
        threads.caller = asyncio.create_task(threads.run(call, "no number"))
        with pytest.raises(asyncio.CancelledError):
            await threads.caller
    assert (threads.abandoned, threads.started) == (0, 1)
