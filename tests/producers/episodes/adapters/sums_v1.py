"""A taskset of verifiers v1, with a tool, rewards and a stop."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str
    fault: str = ""


class AddToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=0.5)
    async def right(self, task, trace) -> float:
        if task.fault == "reward":
            raise RuntimeError("the scales are broken")
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def brief(self, trace) -> float:
        return 0.25 * (trace.num_turns < 3)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    tools: bool = False


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for total in range(3):
            yield SumsTask(SumsData(prompt=f"what is 0 + {total}?", answer=f"{total}"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [AddToolset(vf.SharedToolsetConfig())] if config.tools else []


if __name__ == "__main__":
    AddToolset.run()
