"""The router of reward models: a state machine, without a clock and without servers."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.consumers.models.router import EJECT_AFTER, FIRST_PAUSE, RECENT, PoolServerState, RequestOutcome, Router

A, B, C = "http://a", "http://b", "http://c"


def serving(*urls: str, limit: int = 8) -> Router:
    router = Router(limit)
    router.follow(urls)
    for url in urls:
        assert router.checked(url, 0.0, healthy=True) is PoolServerState.SERVING
    return router


def fly(router: Router, now: float, exclude=()):
    url = router.pick(now, exclude)
    assert url is not None
    return router.began(url, now)


def fail(router: Router, url: str, now: float, times: int = EJECT_AFTER) -> None:
    for _ in range(times):
        router.ended(router.began(url, now), RequestOutcome.FAULT, now, "broken")


def state(router: Router, url: str) -> PoolServerState:
    return next(row.state for row in router.standings() if row.url == url)


def test_a_server_gets_nothing_before_its_health_was_checked():
    router = Router(8)
    router.follow([A])
    assert router.pick(0.0) is None
    assert not router.works()
    assert router.checked(B, 0.0, healthy=True) is None, "nobody knows this one"
    assert router.checked(A, 0.0, healthy=False, why="refused") is None
    assert router.pick(0.0) is None
    assert router.checked(A, 1.0, healthy=True) is PoolServerState.SERVING
    assert router.pick(1.0) == A


def test_the_least_busy_one_is_picked_and_equals_take_turns():
    router = serving(A, B, C)
    flights = [fly(router, 0.0) for _ in range(6)]
    assert sorted(flight.url for flight in flights) == [A, A, B, B, C, C]
    router.ended(flights[4], RequestOutcome.OK, 1.0)
    assert router.pick(1.0) == flights[4].url


def test_work_counts_and_not_the_number_of_requests():
    router = serving(A, B)
    long = router.began(A, 0.0, cost=1000)
    flights = [router.began(router.pick(0.0), 0.0, cost=100) for _ in range(6)]
    assert {flight.url for flight in flights} == {B}
    router.ended(long, RequestOutcome.OK, 0.0)
    assert router.pick(0.0) == A


def test_a_server_with_a_fault_comes_last_for_a_while():
    router = serving(A, B)
    fail(router, A, 0.0, times=1)
    flights = [fly(router, 0.1) for _ in range(8)]
    assert {flight.url for flight in flights} == {B}
    assert router.pick(0.1) == A, "B is full"
    for flight in flights:
        router.ended(flight, RequestOutcome.OK, 0.2)
    assert {fly(router, RECENT + 1).url for _ in range(2)} == {A, B}
    for now, failed, picked in ((21.0, A, B), (22.0, B, A), (23.0, A, B)):
        fail(router, failed, now, times=1)
        assert router.pick(now) == picked, "the last fault is longer ago"


def test_faults_in_a_row_eject_and_a_success_between_them_does_not_let_them():
    router = serving(A, B)
    for _ in range(5):
        fail(router, A, 0.0, times=EJECT_AFTER - 1)
        router.ended(router.began(A, 0.0), RequestOutcome.OK, 0.0)
    assert state(router, A) is PoolServerState.SERVING
    fail(router, A, 1.0)
    assert state(router, A) is PoolServerState.EJECTED
    assert router.pick(1.0, {B}) is None


def test_return_takes_a_pause_then_health_then_one_request():
    router = serving(A)
    fail(router, A, 10.0)
    assert router.checked(A, 10.0 + FIRST_PAUSE / 2, healthy=True) is None, "too early"
    assert router.to_check(10.0 + FIRST_PAUSE / 2, 2.0) == []
    now = 10.0 + FIRST_PAUSE
    assert router.to_check(now, 2.0) == [A]
    assert router.checked(A, now, healthy=False) is None
    assert router.checked(A, now, healthy=True) is PoolServerState.TRIAL
    flight = fly(router, now)
    assert router.pick(now) is None, "one at a time"
    assert router.works()
    assert router.ended(flight, RequestOutcome.OK, now) is PoolServerState.SERVING
    assert [fly(router, now).url for _ in range(8)] == [A] * 8


def test_each_ejection_without_a_success_doubles_the_pause():
    router, now, pauses = serving(A), 0.0, []
    fail(router, A, now)
    for _ in range(9):
        start = now
        while router.checked(A, now, healthy=True) is not PoolServerState.TRIAL:
            now += 0.5
        pauses.append(now - start)
        router.ended(fly(router, now), RequestOutcome.FAULT, now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    while router.checked(A, now, healthy=True) is not PoolServerState.TRIAL:
        now += 0.5
    router.ended(fly(router, now), RequestOutcome.OK, now)
    fail(router, A, now)
    assert router.checked(A, now + FIRST_PAUSE, healthy=True) is PoolServerState.TRIAL


def test_requests_from_before_an_ejection_do_not_eject_again():
    router = serving(A)
    old = [fly(router, 0.0) for _ in range(6)]
    fail(router, A, 1.0, times=2)
    router.ended(old[0], RequestOutcome.FAULT, 1.0)
    assert state(router, A) is PoolServerState.EJECTED
    assert router.checked(A, 3.0, healthy=True) is PoolServerState.TRIAL
    for flight in old[1:]:
        router.ended(flight, RequestOutcome.FAULT, 3.0)
    assert state(router, A) is PoolServerState.TRIAL
    assert router.standings()[0].ejections == 1


def test_missed_health_ejects_only_who_serves_nobody():
    router = serving(A)
    for _ in range(5):
        router.checked(A, 1.0, healthy=False, why="slow")
        router.checked(A, 1.0, healthy=False, why="slow")
        router.ended(fly(router, 1.0), RequestOutcome.OK, 1.0)
    assert state(router, A) is PoolServerState.SERVING
    assert [router.checked(A, 2.0, healthy=False) for _ in range(3)] == [None, None, PoolServerState.EJECTED]


def test_who_served_just_now_need_not_be_checked():
    router = serving(A, B)
    router.ended(router.began(A, 5.0), RequestOutcome.OK, 5.0)
    assert router.to_check(6.0, 2.0) == [B]
    assert router.to_check(7.0, 2.0) == [A, B]


def test_a_busy_server_rests_and_stays_in():
    router = serving(A, B)
    for _ in range(5):
        router.ended(router.began(A, 0.0), RequestOutcome.BUSY, 0.0, rest=4.0)
    assert state(router, A) is PoolServerState.SERVING
    assert {fly(router, 1.0).url for _ in range(4)} == {B}
    assert router.pick(1.0, {B}) is None
    assert router.works({B})
    assert router.first_rest_ends(1.0, {B}) == 4.0
    assert router.pick(4.0, {B}) == A


def test_rest_grows_while_nobody_says_for_how_long_and_has_bounds():
    router, now, rests = serving(A), 0.0, []
    for _ in range(10):
        router.ended(router.began(A, now), RequestOutcome.BUSY, now)
        until = router.first_rest_ends(now)
        assert until is not None
        rests.append(until - now)
        now = until
    assert rests == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    for rest in (-1.0, 0.0, 1e9):
        router = serving(A)
        router.ended(router.began(A, 0.0), RequestOutcome.BUSY, 0.0, rest=rest)
        assert (router.first_rest_ends(0.0) or 0.0) <= 60


def test_a_list_is_followed_and_a_removed_server_ends_what_it_has_and_comes_back_as_it_was():
    router = serving(A, B)
    flight = router.began(A, 0.0)
    assert router.follow([B, C, C]) == ([C], [A])
    assert router.follow([B, C]) == ([], [])
    assert (router.urls, router.known) == ({B, C}, {A, B, C})
    assert {fly(router, 0.0).url for _ in range(3)} == {B}
    router.follow([A, B])
    assert state(router, A) is PoolServerState.SERVING
    assert router.standings()[0].in_flight == 1
    router.follow([B])
    router.ended(flight, RequestOutcome.OK, 1.0)
    assert router.known == {B}
    router.follow([A, B])
    assert state(router, A) is PoolServerState.UNCHECKED


class Anything(RuleBasedStateMachine):
    """Requests, health, lists and time in any order: places are never lost, never given twice."""

    LIMIT = 3

    @initialize()
    def start(self):
        self.router, self.now, self.flights = Router(self.LIMIT), 0.0, []

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 7.0, 70.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(urls=st.lists(st.sampled_from([A, B, C])))
    def the_list_changes(self, urls):
        self.router.follow(urls)
        assert self.router.urls == set(urls)

    @rule(url=st.sampled_from([A, B, C]), healthy=st.booleans())
    def health_is_checked(self, url, healthy):
        self.router.checked(url, self.now, healthy=healthy)

    @rule(exclude=st.sets(st.sampled_from([A, B, C])))
    def a_request_begins(self, exclude):
        url = self.router.pick(self.now, exclude)
        if url is None:
            return
        assert self.router.works(exclude)
        assert url not in exclude
        assert url in self.router.urls
        assert state(self.router, url) in {PoolServerState.SERVING, PoolServerState.TRIAL}
        self.flights.append(self.router.began(url, self.now))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), outcome=st.sampled_from(RequestOutcome), rest=st.none() | st.floats(0, 100))
    def a_request_ends(self, data, outcome, rest):
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.router.ended(flight, outcome, self.now, "why", rest)

    @invariant()
    def places_are_counted(self):
        rows = self.router.standings()
        assert sum(row.in_flight for row in self.router.standings()) == len(self.flights)
        assert self.router.slots >= self.LIMIT
        for row in rows:
            assert row.in_flight == sum(flight.url == row.url for flight in self.flights)
            assert 0 <= row.in_flight <= self.LIMIT
            assert row.in_flight or not row.leaving, "a server that left is forgotten"

    def teardown(self):
        for flight in self.flights:
            self.router.ended(flight, RequestOutcome.CANCELLED, self.now)
        assert sum(row.in_flight for row in self.router.standings()) == 0
        assert self.router.known == self.router.urls


Anything.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase


@given(st.lists(st.sampled_from(RequestOutcome), max_size=30), st.integers(1, 5))
@settings(deadline=None)
def test_while_one_server_works_there_is_always_a_place_to_wait_for(outcomes, limit):
    """A never fails: whatever B does, a request has somewhere to go."""
    router, now = serving(A, B, limit=limit), 0.0
    for outcome in outcomes:
        now += 0.1
        if router.pick(now, {A}) == B:
            router.ended(router.began(B, now), outcome, now)
        assert router.pick(now) is not None
