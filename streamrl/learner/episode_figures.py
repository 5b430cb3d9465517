"""What a step says of its episodes: turns, branches, tools, and why they ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from streamrl import wire
from streamrl.learner.tree import Tree


@dataclass(kw_only=True, slots=True)
class EpisodeFigures:
    """Sums over samples with turns; they add up over groups and steps."""

    episodes: int = 0
    turns: int = 0  # sampled ones
    branches: int = 0
    sampled: int = 0
    observed: int = 0
    context: int = 0  # tokens before sampled turns, each time they were read
    cached: int = 0  # of these, the ones that the engine still had
    calls: int = 0
    unknown: int = 0
    failed: int = 0  # calls that did not end well, unknown tools apart
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    rewards: float = 0.0
    replayed: int = 0
    restarts: int = 0
    stops: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, sample: wire.Sample, tree: Tree, prompt: int = 0) -> EpisodeFigures:
        """Figures of one sample with its tree, whose prompt has so many tokens."""
        uses = [use for turn in sample.turns for use in turn.tools]
        before, context = [0] * len(sample.turns), 0
        roots = {wire.PROMPT: prompt, wire.NOTHING: 0}
        for number, turn in enumerate(sample.turns):
            parent = turn.parent
            before[number] = roots[parent] if parent < 0 else before[parent] + tree.length(parent)
            context += before[number] if turn.sampled else 0
        return cls(
            episodes=1,
            turns=sum(turn.sampled > 0 for turn in sample.turns),
            branches=len(tree.branches),
            sampled=sum(tree.sampled),
            observed=sum(map(len, tree.observed)),
            context=context,
            cached=sum(turn.cached for turn in sample.turns),
            calls=len(uses),
            unknown=sum(use.outcome == "unknown" for use in uses),
            failed=sum(use.outcome not in {"ok", "unknown"} for use in uses),
            model_seconds=sum(turn.model_seconds for turn in sample.turns),
            tool_seconds=sum(turn.tool_seconds for turn in sample.turns),
            rewards=sum(tree.rewards),
            replayed=sample.replayed,
            restarts=sample.restarts,
            stops=Counter([sample.stop or "unknown"]),
        )

    def __add__(self, other: EpisodeFigures) -> EpisodeFigures:
        names = [each.name for each in fields(self)]
        return EpisodeFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def line(self) -> dict[str, Any]:
        """The keys of a step's line (docs/reference/metrics.md); none without episodes."""
        if not self.episodes:
            return {}
        return {
            "episodes": self.episodes,
            "turns_per_sample": self.turns / self.episodes,
            "branches_per_sample": self.branches / self.episodes,
            "stops": dict(sorted(self.stops.items())),
            "observed_fraction": self.observed / max(1, self.observed + self.sampled),
            "cached_fraction": self.cached / max(1, self.context),
            "turn_reward_mean": self.rewards / self.episodes,
            "model_seconds_per_sample": self.model_seconds / self.episodes,
            "tool_seconds_per_sample": self.tool_seconds / self.episodes,
            "tool_calls": self.calls,
            "tool_failures": self.failed,
            "tool_unknown": self.unknown,
            "replayed_turns": self.replayed,
            "restarted_episodes": self.restarts,
        }
