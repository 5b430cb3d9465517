"""Who has which sample: the state machine alone, with a clock that is a number."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamrl.consumers import Score
from streamrl.consumers.gateway.offers import Offers, ProgramsLost, SampleOffer

PLENTY = 1 << 20


def offer(offers, body=b"{}"):
    ends = []
    made = SampleOffer(body, ends.append)
    offers.add(made)
    return made, ends


def test_a_lease_that_is_renewed_lasts_and_one_that_is_not_goes_to_the_next():
    offers = Offers(3)
    kept, _ = offer(offers)
    lost, _ = offer(offers)
    offers.lease(2, 10.0, 0.0, PLENTY)
    old = lost.lease
    assert offers.renew([kept.lease, "nobody's"], 9.0) == ["nobody's"]
    assert offers.expire(10.0)
    assert offers.lease(2, 10.0, 10.0, PLENTY) == [lost]
    assert not offers.settle(old, Score(1.0))
    assert offers.renew([old], 10.0) == [old]
    assert offers.next_end() == 19.0


def test_what_a_program_lost_or_gave_back_comes_before_the_others():
    offers = Offers(3)
    first, _ = offer(offers)
    offers.lease(1, 10.0, 0.0, PLENTY)
    second, _ = offer(offers)
    assert offers.release([first.lease]) == []
    assert first.losses == 0
    assert offers.lease(2, 10.0, 1.0, PLENTY) == [first, second], "the oldest first"
    assert offers.lease(2, 10.0, 1.0, PLENTY) == []


def test_a_sample_that_so_many_programs_lost_fails():
    offers = Offers(2)
    made, ends = offer(offers)
    for now in (0.0, 10.0):
        assert offers.lease(1, 10.0, now, PLENTY) == [made]
        offers.expire(now + 10.0)
    (end,) = ends
    assert isinstance(end, ProgramsLost)
    assert offers.counts() == {"waiting": 0, "leased": 0, "taken": 0, "failed": 1, "lost": 2}


def test_a_repeated_post_answers_the_same_and_settles_once():
    offers = Offers(2)
    made, ends = offer(offers)
    offers.lease(1, 10.0, 0.0, PLENTY)
    assert offers.settle(made.lease, Score(1.0))
    assert offers.settle(made.lease, Score(0.0))
    assert ends == [Score(1.0)]
    assert offers.taken == 1


def test_an_answer_is_not_larger_than_it_may_be_but_one_sample_always_fits():
    offers = Offers(2)
    large, _ = offer(offers, b"x" * 100)
    small = [offer(offers, b"x" * 40)[0] for _ in range(3)]
    assert offers.lease(9, 10.0, 0.0, 90) == [large]
    assert offers.lease(9, 10.0, 0.0, 90) == small[:2]


class OffersMachine(RuleBasedStateMachine):
    """Whatever programs and the worker do, each sample is in one place, and is settled once at most."""

    def __init__(self):
        super().__init__()
        self.offers = Offers(3)
        self.now = 0.0
        self.made = []
        self.withdrawn = set()
        self.leases = ["nobody's"]

    @rule(count=st.integers(1, 3))
    def add(self, count):
        self.made += [offer(self.offers) for _ in range(count)]

    @rule(count=st.integers(1, 4), seconds=st.integers(1, 5))
    def lease(self, count, seconds):
        given = self.offers.lease(count, seconds, self.now, PLENTY)
        assert len({each.lease for each in given} - set(self.leases)) == len(given), "a lease is new"
        self.leases += [each.lease for each in given]

    @rule(seconds=st.integers(0, 4))
    def time(self, seconds):
        self.now += seconds
        self.offers.expire(self.now)
        assert (self.offers.next_end() or self.now + 1) > self.now

    @rule(data=st.data())
    def renew(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        holds = lease in self.held()
        assert self.offers.renew([lease], self.now) == ([] if holds else [lease])

    @rule(data=st.data())
    def release(self, data):
        self.offers.release([data.draw(st.sampled_from(self.leases))])

    @rule(data=st.data(), good=st.booleans())
    def settle(self, data, good):
        lease = data.draw(st.sampled_from(self.leases))
        holder = self.held().get(lease)
        before = [len(ends) for _, ends in self.made]
        end = Score(1.0) if good else ValueError("no")
        taken = self.offers.settle(lease, end)
        if holder is not None:
            assert taken
            assert self.ends_of(holder) == [end]
        else:
            assert [len(ends) for _, ends in self.made] == before, "only the holder settles"

    @rule(data=st.data())
    def withdraw(self, data):
        if self.made:
            number = data.draw(st.integers(0, len(self.made) - 1))
            self.offers.withdraw(self.made[number][0])
            self.withdrawn.add(number)

    def held(self):
        return {
            each.lease: each
            for number, (each, ends) in enumerate(self.made)
            if each.lease and not ends and number not in self.withdrawn
        }

    def ends_of(self, wanted):
        return next(ends for each, ends in self.made if each is wanted)

    @invariant()
    def each_is_in_one_place(self):
        assert all(len(ends) <= 1 for _, ends in self.made)
        open_ones = [each for number, (each, ends) in enumerate(self.made) if not ends and number not in self.withdrawn]
        counts = self.offers.counts()
        assert counts["waiting"] == sum(not each.lease for each in open_ones)
        assert counts["leased"] == sum(bool(each.lease) for each in open_ones)


TestOffersMachine = OffersMachine.TestCase
TestOffersMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
