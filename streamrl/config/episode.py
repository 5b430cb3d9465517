"""Configuration of episodes: who runs them, what they may use, and when they end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, FiniteFloat, field_validator, model_validator

from streamrl.config.base import Duration, Positive, Section

RUN_PYTHON: Final = "run_python"
"""The built-in tool, as `episode.tools` names it."""
EpisodeKind: TypeAlias = Literal["run", "tools", "environment", "agent"]
_KINDS: Final[tuple[EpisodeKind, ...]] = ("run", "tools", "environment", "agent")


def _import_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{value!r} is not an import path: write module:Name, for example my_episodes:Game")
    return value


def _tool(value: str) -> str:
    if value == RUN_PYTHON:
        return value
    if ":" not in value:
        raise ValueError(f"{value!r} is no tool: write {RUN_PYTHON}, which is built in, or module:function")
    return _import_path(value)


ImportPath = Annotated[str, AfterValidator(_import_path)]
ToolName = Annotated[str, AfterValidator(_tool)]
CALL_DRAWS: Final = ("temperature", "top_p", "top_k", "min_p")
"""How a reply is drawn, as a call of an agent may say."""
_GONE: Final = ("remote", "port", "token_file")


class AgentConfig(Section):
    """A program that acts through the OpenAI-compatible endpoint of its sample."""

    command: tuple[str, ...] = Field(
        min_length=1, description="program and arguments, without a shell; STREAMRL_TASK is the path of its task"
    )
    directory: Path | None = Field(None, description="working directory; empty: a new one for each sample")
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables besides our own")
    answer: bool = Field(False, description="the agent's task holds the answer of the data set, too")
    ignore: tuple[str, ...] = Field(
        ("strict",),
        description="options of calls that are ignored instead of refused, by name; many packages set `strict` by"
        " themselves: that calls fit their schema, which those of a policy that learns need not",
    )
    failed: Literal["score", "drop"] = Field(
        "score",
        description="an agent that fails after a reply of the model has the score that it posted, else failed_score;"
        " drop: its sample is a dead letter",
    )
    failed_score: FiniteFloat | None = Field(
        None, description="score of an agent that fails and has posted none; empty: none, for other rewards to score"
    )
    host: str = Field("127.0.0.1", description="address on which the endpoint listens, for agents on other hosts")
    max_calls: Positive = Field(32, description="calls of one agent that are answered at the same time; others wait")

    @property
    def draws(self) -> bool:
        """Whether calls may say how their replies are drawn."""
        return not set(CALL_DRAWS) <= set(self.ignore)

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, values: object) -> object:
        """Keys of an earlier version; runs that were saved with their defaults can be looked at."""
        if not isinstance(values, dict):
            return values
        if any(values.get(name) for name in _GONE):
            raise ValueError("programs no longer fetch tasks: use `agent: {command: [ssh, HOST, PROGRAM]}`")
        if values.get("keep", "all") != "all":
            raise ValueError(
                "keep is gone, all replies that an agent got are trained: leave it out, and mark calls for titles and"
                " summaries with the header `X-Streamrl-Auxiliary: 1`"
            )
        return {name: value for name, value in values.items() if name not in {*_GONE, "keep"}}

    @model_validator(mode="after")
    def _check_failed(self) -> AgentConfig:
        if self.failed == "drop" and self.failed_score is not None:
            raise ValueError("failed_score is for `failed: score`; with `failed: drop` there is nothing to score")
        return self

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value


class EpisodeConfig(Section):
    """Episodes of several turns. One of `run`, `tools`, `environment` and `agent` makes a run one of episodes."""

    run: ImportPath | None = Field(None, description="module:Class of a subclass of Episode")
    tools: tuple[ToolName, ...] = Field(
        (), description="functions (module:function) that the model may call, and the built-in run_python"
    )
    environment: ImportPath | None = Field(
        None, description="module:Class with reset, public methods as tools and get_reward, as TRL takes it"
    )
    agent: AgentConfig | None = Field(None, description="a program that talks to the OpenAI-compatible endpoint")
    args: dict[str, object] = Field(default_factory=dict, description="keyword arguments of run or environment")
    run_python: dict[str, object] = Field(
        default_factory=dict,
        description="arguments of the tool run_python: limits and isolation of its programs, named as those of the"
        " reward code (docs/guides/code-rewards.md)",
    )
    max_turns: Positive = Field(16, description="sampled turns of an episode, all branches together")
    max_forks: Positive = Field(64, description="branches of an episode besides the first")
    max_tool_calls: Positive | None = Field(None, description="calls of tools in an episode; empty: no limit")
    max_parse_errors: Positive | None = Field(
        None, description="replies in a row with a call that cannot be read; empty: no limit"
    )
    max_sampled_tokens: Positive | None = Field(None, description="sampled tokens of an episode; empty: no limit")
    max_tool_response: Positive = Field(
        16384, description="characters of a tool's answer; a longer one is cut in the middle, with a note"
    )
    tool_deadline: Duration = Field(60.0, description="longest time of one call of a tool")
    deadline: Duration = Field(300.0, description="longest time of an episode, from its start to its reward")
    scoring_share: float = Field(0.1, gt=0, lt=1, description="part of deadline that is kept for the score")
    timed_out: Literal["score", "drop"] = Field(
        "score", description="an episode that ran out of time is scored with what there is, or is a dead letter"
    )
    concurrent: Positive | None = Field(
        None, description="episodes that a process runs at the same time; empty: twice what its engine can decode"
    )
    deterministic: bool = Field(
        False, description="the tools give the same answers again, so that another process may replay recorded turns"
    )
    prefix_cache: Literal["sample", "refresh"] = Field(
        "sample",
        description="sample: later turns use keys and values that the weights of the first turn computed; refresh: new"
        " weights compute them again",
    )
    tool_format: str = Field("auto", description="how the model writes tool calls; auto: known from its tokenizer")

    @model_validator(mode="before")
    @classmethod
    def _refuse_shares(cls, values: object) -> object:
        if isinstance(values, dict) and "shares" in values:
            raise ValueError("shares is gone: leave it out; scoring_share is what is kept of deadline for the score")
        return values

    @property
    def kind(self) -> EpisodeKind | None:
        """Who runs the episodes; None: the run has single answers."""
        return next((name for name in _KINDS if getattr(self, name)), None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_processes(cls, values: Any) -> Any:
        if isinstance(values, dict) and "processes" in values:
            raise ValueError(
                "processes was the number of processes of role agent, which is gone: leave it out, and set"
                " rollout.replicas or `streamrl scale rollout=N` for more processes that run episodes"
            )
        return values

    @model_validator(mode="after")
    def _check_kind(self) -> EpisodeConfig:
        given = [name for name in _KINDS if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"episode.{given[0]} and episode.{given[1]} both run the episodes: set one of them")
        if self.args and not (self.run or self.environment):
            raise ValueError("episode.args are the arguments of episode.run or episode.environment: set one of them")
        if self.run_python and RUN_PYTHON not in self.tools:
            raise ValueError(f"episode.run_python has the arguments of a tool: add {RUN_PYTHON} to episode.tools")
        changed = [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if changed and not given:
            raise ValueError(
                f"episode.{changed[0]} is set, and nothing runs the episodes: set one of episode.{', '.join(_KINDS)}"
            )
        return self
