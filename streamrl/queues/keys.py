"""Names of the keys in Redis. The `{sr:RUN}` tag keeps a run in one cluster slot: all of it is one node's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP: Final = "g"
"""Name of the one consumer group of each work stream."""
ALL_SAMPLES: Final = "*"
"""In an entry of `rollouts` in place of the number of a sample: all samples of the group, to be scored together."""

BEAT_TTL: Final = 10.0
"""Seconds after which a silent role vanishes from the board."""
REWARD_FIGURES: Final = "rewards"
"""Field of a reward worker's heartbeat: JSON, figures by the name of the reward."""


@dataclass(frozen=True)
class Keys:
    """Keys of one key space of a run: training (`{sr:RUN}:`) or held-out (`{sr:RUN}:eval:`)."""

    run: str
    evaluation: bool = False

    def _key(self, name: str) -> str:
        return f"{{sr:{self.run}}}:{'eval:' if self.evaluation else ''}{name}"

    def group(self, group_id: int) -> str:
        """Hash of one prompt group: everything that is known of it."""
        return self._key(f"group:{group_id}")

    @property
    def prompts(self) -> str:
        """Work stream of prompt groups to generate for; entry `g` (group), `a` (attempt)."""
        return self._key("prompts")

    @property
    def rollouts(self) -> str:
        """Work stream of samples to score; entry `g`, `a`, `k` (a sample, or `ALL_SAMPLES`)."""
        return self._key("rollouts")

    @property
    def scored(self) -> str:
        """Stream of closed groups, without a consumer group: one fenced learner reads all of it."""
        return self._key("scored")

    @property
    def live(self) -> str:
        """Sorted set of the ids of all groups that have a hash."""
        return self._key("live")

    @property
    def dead(self) -> str:
        """Stream of dead letters; `k` is -1 for a whole group."""
        return self._key("dead")

    @property
    def replays(self) -> str:
        """Hash of the dead groups that wait to be admitted again: group to its letter and those of its samples."""
        return self._key("replays")

    @property
    def dropped(self) -> str:
        """Bitmap of the groups that were dropped."""
        return self._key("dropped")

    def dropped_for(self, why: str) -> str:
        """Bitmap of the groups that were dropped for one reason."""
        return self._key(f"dropped:{why}")

    @property
    def state(self) -> str:
        """Hash with cursor, fingerprint, learner epoch and nonce, checkpoint, held, version and statistics."""
        return self._key("state")

    @property
    def weights(self) -> str:
        """Broadcast stream of weight manifests (training key space only)."""
        return f"{{sr:{self.run}}}:weights"

    @property
    def device_lock(self) -> str:
        """Hash: which learner asks for or has the devices that it shares with the engines, and until when."""
        return f"{{sr:{self.run}}}:turn"

    @property
    def device_engines(self) -> str:
        """Sorted set of the engines that use the shared devices, by the end of their lease."""
        return f"{{sr:{self.run}}}:turn:engines"

    @property
    def roles(self) -> str:
        """Set of the names of all roles that ever wrote a heartbeat."""
        return f"{{sr:{self.run}}}:roles"

    def role(self, name: str) -> str:
        """Hash with a time to live: what a role says of itself."""
        return f"{{sr:{self.run}}}:role:{name}"

    @property
    def engines(self) -> str:
        """Hash of the engine servers that were added to the run or removed from it; `#` counts the added ones."""
        return f"{{sr:{self.run}}}:engines"

    @property
    def servers(self) -> str:
        """Set of the names of all replicas that ever spoke of engine servers."""
        return f"{{sr:{self.run}}}:servers"

    def server_report(self, replica: str) -> str:
        """Hash with a time to live: how the engine servers of a replica are, each as JSON."""
        return f"{{sr:{self.run}}}:servers:{replica}"

    def reward_servers(self, model: str) -> str:
        """Hash of the servers that people added to a reward model or removed from it; `#` counts the added ones."""
        return f"{{sr:{self.run}}}:reward_servers:{model}"

    def rate_limit(self, model: str) -> str:
        """Hash: the rate limit of a reward model: how full both buckets were when somebody last looked."""
        return f"{{sr:{self.run}}}:limit:{model}"

    def rate_waiting(self, model: str) -> str:
        """Sorted set: the line of the requests that wait for their turn."""
        return f"{{sr:{self.run}}}:limit:{model}:waiting"

    def rate_granted(self, model: str) -> str:
        """Sorted set of the requests that had their turn and are not settled, by the time of their turn."""
        return f"{{sr:{self.run}}}:limit:{model}:granted"
