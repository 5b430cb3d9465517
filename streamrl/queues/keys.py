"""Names of the keys in Redis. The `{sr:RUN}` tag keeps a run in one cluster slot: all of it is one node's memory."""

from __future__ import annotations

from typing import Final

GROUP: Final = "g"
"""Name of the one consumer group of each work stream."""
ALL_SAMPLES: Final = "*"
"""In an entry of `rollouts` in place of the number of a sample: all samples of the group, to be scored together."""
BEAT_TTL: Final = 10.0
"""Seconds after which a silent role vanishes from the board."""
SUPERVISOR: Final = "supervisor"
"""Name of the supervisor among the roles that send heartbeats."""
REWARD_FIGURES: Final = "rewards"
"""Field of a reward worker's heartbeat: JSON, figures by the name of the reward."""
SOURCE_FIGURES: Final = "sources"
"""Field of the heartbeats of learner and feeder: JSON, figures by the source of prompts."""


class Keys:
    """Keys of one key space of a run: training (`{sr:RUN}:`) or held-out (`{sr:RUN}:eval:`).

    Attributes:
        prompts: work stream of prompt groups to generate for; entry `g` (group), `a` (attempt).
        rollouts: work stream of samples to score; entry `g`, `a`, `k` (a sample, or `ALL_SAMPLES`).
        scored: stream of closed groups, without a consumer group: one fenced learner reads all of it.
        live: sorted set of the ids of all groups that have a hash.
        dead: stream of dead letters; `k` is -1 for a whole group.
        replays: hash of the dead groups that wait to be admitted again: group to its letter and those of its samples.
        outcomes: hash of what groups scored, by their id, until the curriculum of the feeder has it.
        dropped: bitmap of the groups that were dropped.
        state: hash with cursor, fingerprint, learner epoch and nonce, checkpoint, held, version and statistics.

    The others are of the run, whatever the key space:
        weights: broadcast stream of weight manifests.
        device_lock: hash: which learner asks for or has the devices that it shares with the engines, and until when.
        device_engines: sorted set of the engines that use the shared devices, by the end of their lease.
        roles: set of the names of all roles that ever wrote a heartbeat.
        hosts: hash of the processes that ever lived, each with its host, its first heartbeat and its last.
        deaths: hash of the consumers that died: how many pieces of work may be to blame, and when that was said.
        lives: hash of the replicas that ever started, each with the nonce of its first life.
        supervising: id of the one supervisor, with a time to live.
        logs: set of the names of all roles whose last log lines are kept.
        run_file: the configuration, for machines without the run directory.
        run_digest: which rendered manifests it is of; empty: of none.
        weights_token: the token of the weights for them; users who only look have no right to keys with `!`.
    """

    def __init__(self, run: str, *, evaluation: bool = False) -> None:
        self.evaluation = evaluation
        self._run = f"{{sr:{run}}}:"
        self._space = f"{self._run}eval:" if evaluation else self._run
        self.prompts = f"{self._space}prompts"
        self.rollouts = f"{self._space}rollouts"
        self.scored = f"{self._space}scored"
        self.live = f"{self._space}live"
        self.dead = f"{self._space}dead"
        self.replays = f"{self._space}replays"
        self.outcomes = f"{self._space}outcomes"
        self.dropped = f"{self._space}dropped"
        self.state = f"{self._space}state"
        self.weights = f"{self._run}weights"
        self.device_lock = f"{self._run}turn"
        self.device_engines = f"{self._run}turn:engines"
        self.roles = f"{self._run}roles"
        self.hosts = f"{self._run}hosts"
        self.deaths = f"{self._run}deaths"
        self.lives = f"{self._run}lives"
        self.run_file = f"{self._run}run"
        self.run_digest = f"{self._run}run-digest"
        self.weights_token = f"{self._run}!weights-token"
        self.supervising = f"{self._run}supervising"
        self.logs = f"{self._run}logs"

    def group(self, group_id: int) -> str:
        return f"{self._space}group:{group_id}"

    def dropped_for(self, why: str) -> str:
        return f"{self._space}dropped:{why}"

    def role(self, name: str) -> str:
        return f"{self._run}role:{name}"

    def member(self, kind: str, index: int) -> str:
        """Who has this number among the members of a role (`--index auto`)."""
        return f"{self._run}member:{kind}:{index}"

    def log(self, role: str) -> str:
        """Stream of the last log lines of a role."""
        return f"{self._run}log:{role}"

    def asked(self, supervisor: str) -> str:
        """Hash of what people asked of one start of the supervisor: `end`, `count:ROLE`."""
        return f"{self._run}asked:{supervisor}"

    def reward_servers(self, model: str) -> str:
        """Hash of the servers that were added to a reward model or removed from it; `#` counts the added ones."""
        return f"{self._run}reward_servers:{model}"
