import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.restarts import RestartPolicy
from streamrl.runtime.instance import ALIVE, FINAL, Instance, RoleState

POLICY = RestartPolicy(max_restarts=3, window=100.0, backoff=0.5, max_backoff=30.0)


def started(finishes=False, policy=POLICY):
    instance = Instance(policy, finishes)
    instance.start()
    return instance


def test_a_crash_waits_and_starts_again():
    instance = started()
    instance.ready(1.0)
    instance.died(2.0, -9, "killed by SIGKILL", 0.5)
    assert (instance.state, instance.until, instance.restarts) == (RoleState.BACKOFF, 2.25, 0)
    instance.start()
    assert (instance.state, instance.restarts) == (RoleState.STARTING, 1)
    instance.ready(3.0)
    assert (instance.state, instance.reason) == (RoleState.READY, "")
    instance.died(63.0, 1, "", 0.5)
    assert instance.until == 63.25  # after 60 s of health the pauses begin anew


@pytest.mark.parametrize("code", [3, 64, 70, 73, 78])
def test_what_a_restart_cannot_mend_fails_at_once(code):
    instance = started()
    instance.died(0.0, code, "why", 0.5)
    assert (instance.state, instance.reason, instance.exit_code) == (RoleState.FAILED, "why", code)


def test_exit_zero_is_the_end_of_those_who_finish_and_a_death_of_those_who_serve():
    learner, worker = started(finishes=True), started()
    learner.died(0.0, 0, "exit 0", 0.5)
    worker.died(0.0, 0, "exit 0", 0.5)
    assert (learner.state, worker.state) == (RoleState.STOPPED, RoleState.BACKOFF)


@pytest.mark.parametrize("code", [0, 1, 78, -9])
def test_what_ends_while_draining_stays_stopped(code):
    instance = started()
    instance.drain("run ends")
    instance.ready(1.0)
    assert instance.state is RoleState.DRAINING
    instance.died(2.0, code, "why", 0.5)
    assert instance.state is RoleState.STOPPED
    assert instance.reason == ("" if code == 0 else "why")


def test_a_drain_without_a_process_ends_at_once():
    waiting, pausing = Instance(POLICY, False), started()
    pausing.died(0.0, 1, "", 0.5)
    for instance in (waiting, pausing):
        instance.drain("run ends")
        assert instance.state is RoleState.STOPPED


class Life(RuleBasedStateMachine):
    """Whatever happens in whatever order: restarts stay within the limit, final states are final."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.instance = Instance(POLICY, finishes=False)
        self.deaths: list[float] = []
        self.final: RoleState | None = None

    @rule(seconds=st.floats(0, 200))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.instance.state in {RoleState.PENDING, RoleState.BACKOFF})
    @rule()
    def start(self):
        self.instance.start()

    @rule()
    def ready(self):
        self.instance.ready(self.now)

    @rule()
    def drain(self):
        self.instance.drain("asked")

    @precondition(lambda self: self.instance.state in ALIVE)
    @rule(code=st.integers(-64, 255), jitter=st.floats(0, 1, exclude_max=True))
    def die(self, code, jitter):
        self.instance.died(self.now, code, "why", jitter)
        if self.instance.state is RoleState.BACKOFF:
            self.deaths.append(self.now)

    @invariant()
    def restarts_stay_within_the_window(self):
        recent = [at for at in self.deaths if self.now - at < POLICY.window]
        assert len(recent) <= POLICY.max_restarts

    @invariant()
    def final_is_final(self):
        if self.final is not None:
            assert self.instance.state is self.final
        elif self.instance.state in FINAL:
            self.final = self.instance.state


TestLife = Life.TestCase
