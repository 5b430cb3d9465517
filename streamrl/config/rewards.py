"""Keys of a run that say how responses are scored: rewards, how they make one number, and the models behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from streamrl.config.base import Duration, Positive, Section, ServerKind, ServerUrl, Size, StoreUrl

Bounds = tuple[float, float]
REWARD_MODEL_ROLE: Final = "reward_model"
"""Kind of the roles that are servers of reward models."""
RewardModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""Part of the names of roles, logs and keys in Redis."""


class Normalisation(Section):
    """`(value - mean) / std`, then a squashing function; constants, so that a response always gets the same score."""

    mean: FiniteFloat = Field(0.0, description="subtracted")
    std: Annotated[FiniteFloat, Field(gt=0)] = Field(1.0, description="divided by")
    squash: Literal["none", "sigmoid", "tanh"] = Field("none", description="function of the result")


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class When(Section):
    """Which prompts a reward is called for."""

    source: Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1)] = Field(
        description="prompts of this source (docs/guides/combine-rewards.md), or of one of these; a name or a list"
    )


class RewardSpec(Section):
    """One reward: a built-in name or `module:Name`."""

    use: str = Field(description="built-in name, module:Name, or entry point of streamrl.rewards")
    name: str | None = Field(None, description="name in scores and metrics; empty: derived from `use`")
    when: When | None = Field(None, description="which prompts it is called for; empty: all")
    weight: FiniteFloat = Field(1.0, description="factor in a sum, exponent in a product; 0: only shown")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")
    adapter: Literal["verl", "trl"] | None = Field(None, description="a function with the signature of another system")
    group: bool = Field(
        False, description="the function compares responses: it is called once for each group, with all its samples"
    )
    gate: FiniteFloat | None = Field(
        None,
        description="the score is scoring.gated unless this reward is at least this; rewards after it are not called",
    )
    normalise: Normalisation | None = Field(None, description="applied before clip and gate")
    clip: Bounds | None = Field(None, description="lowest and highest value, after normalise")
    deadline: Duration | None = Field(None, description="longest time of one attempt; empty: reward_worker.deadline")
    attempts: Positive | None = Field(None, description="attempts per sample; empty: reward_worker.attempts")
    concurrency: Positive | None = Field(None, description="calls at the same time in one worker; empty: no limit")
    on_failure: Literal["drop_sample", "dead", "retry"] | None = Field(
        None, description="empty: reward_worker.on_failure"
    )

    @property
    def adds(self) -> bool:
        """Whether its value is in the sum, product or min."""
        return self.gate is None and bool(self.weight)

    def applies(self, source: str) -> bool:
        return self.when is None or source in self.when.source

    @model_validator(mode="after")
    def _check(self) -> RewardSpec:
        if self.clip is not None and not self.clip[0] <= self.clip[1]:  # also false for NaN
            raise ValueError("clip is [lowest, highest]")
        return self


class OverlongConfig(Section):
    """The soft penalty of long responses (DAPO, arXiv:2503.14476, equation 13)."""

    buffer: Positive = Field(description="tokens before sampling.max_new_tokens over which the penalty grows")
    penalty: Annotated[FiniteFloat, Field(gt=0)] = Field(1.0, description="at the limit")


class ScoringConfig(Section):
    """How the values of all rewards become the score of a response; every part is kept."""

    combine: Literal["sum", "product", "min"] = Field("sum", description="of the rewards without a gate")
    gated: FiniteFloat = Field(0.0, description="score of a response that a gate did not let through")
    clip: Bounds | None = Field(None, description="lowest and highest score, before overlong")
    overlong: OverlongConfig | None = Field(None, description="soft penalty of long responses; empty: none")

    @model_validator(mode="after")
    def _check(self) -> ScoringConfig:
        if self.clip is not None and not self.clip[0] <= self.clip[1]:  # also false for NaN
            raise ValueError("clip is [lowest, highest]")
        return self


class RewardWorkerConfig(Section):
    """Reward workers."""

    replicas: Positive = Field(1, description="number of workers the supervisor starts")
    concurrency: Positive = Field(64, description="samples scored at the same time by one worker")
    deadline: Duration = Field(30.0, description="longest time for one sample and one attempt")
    attempts: Positive = Field(3, description="attempts per sample before on_failure")
    backoff: Duration = Field(0.5, description="first pause between attempts, doubled each time, with full jitter")
    on_failure: Literal["drop_sample", "dead", "retry"] = Field(
        "drop_sample",
        description="drop_sample: the sample dies, the group goes on with the others; dead: the whole group dies, to be"
        " replayed; retry: go on trying for retry_for, then drop_sample",
    )
    retry_for: Duration = Field(600.0, description="how long on_failure retry goes on")

    @model_validator(mode="before")
    @classmethod
    def _refuse_gateway(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and any(str(key).startswith("gateway_") for key in keys):
            raise ValueError(
                "the gateway is gone: `use: http` with args: {url: ...} posts samples to a server of yours"
            )
        return keys


class RewardModelConfig(Section):
    """A model that rewards ask over HTTP: servers of others (`url`), or servers that streamrl starts."""

    kind: Literal[ServerKind, "openai", "template"] = Field("vllm", description="what the servers are")
    task: Literal["classify", "pooling", "chat"] = Field("classify", description="what is asked of them")
    model: str = Field("", description="directory or hub name; as the server knows it")
    url: tuple[ServerUrl, ...] = Field((), description="servers that run already; empty: streamrl starts them")
    servers: Positive = Field(1, description="servers that streamrl starts")
    environment: Path | None = Field(None, description="environment of the servers; empty: .engines/KIND")
    flags: dict[str, Any] = Field(default_factory=dict, description="flags of the servers, passed through")
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables of the servers")
    devices: tuple[str, ...] = Field((), description="cards of each server in turn, as `0,1`; empty: free ones")
    start_deadline: Duration = Field(600.0, description="longest time from the start of a server to its first answer")
    api_key_file: Path | None = Field(None, description="file with the key of the servers")
    concurrency: Positive = Field(64, description="requests in flight at one server, from one worker")
    requests_per_minute: Positive | None = Field(None, description="of all workers together; empty: no limit")
    tokens_per_minute: Positive | None = Field(None, description="of all workers together; empty: no limit")
    sleep: bool = Field(
        False, description="colocated: servers that streamrl starts leave the devices while the learner has its turn"
    )
    max_answer: Size = Field(8 << 20, description="largest answer that is read")

    @property
    def managed(self) -> bool:
        """Whether streamrl starts the servers."""
        return not self.url

    @model_validator(mode="before")
    @classmethod
    def _refuse_wakes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        old = {"wake_at": 32, "wake_after": 5.0}  # a saved configuration names every key
        if changed := [name for name, usual in old.items() if values.get(name, usual) != usual]:
            raise ValueError(f"{changed[0]} is gone, servers no longer sleep without work: leave it out")
        return {name: value for name, value in values.items() if name not in old}

    @model_validator(mode="after")
    def _check(self) -> RewardModelConfig:
        if self.kind in {"openai", "template"} and not self.url:
            raise ValueError(f"kind {self.kind} needs url: streamrl starts no such server")
        if not self.url and not self.model:
            raise ValueError("a server that streamrl starts needs model")
        started = ("environment", "flags", "variables", "devices", "sleep")
        if self.url and (unused := [name for name in started if getattr(self, name)]):
            raise ValueError(f"{unused[0]} is of servers that streamrl starts, and url names others")
        if len(set(self.url)) != len(self.url):
            raise ValueError("url names a server twice")
        return self


class ArchiveConfig(Section):
    """Complete groups with their scores, kept for people and for scoring them again."""

    enabled: bool = Field(True, description="keep closed groups in RUN_DIR/archive")
    max_bytes: Size | None = Field(
        512 << 20,
        description="size above which only the newest groups and a sample of the older ones are kept; as much again for"
        " held-out groups, and never more than a quarter of the disk; empty: keep all",
    )
    file_bytes: Size = Field(
        256 << 20, description="size at which a file is followed by the next; at most an eighth of max_bytes"
    )
    logprobs: bool = Field(True, description="with the log-probabilities of the tokens")
    store: StoreUrl | None = Field(
        None, description="directory or URL (s3://, gs://, az://) that each finished file is copied to, whole"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_files(cls, values: Any) -> Any:
        if isinstance(values, dict) and "files" in values:
            raise ValueError("files is gone: set max_bytes, the size of all files together")
        return values


def check_scoring(rewards: Sequence[RewardSpec], scoring: ScoringConfig, longest: int) -> None:
    """Raise ValueError for rewards that make no score; `longest` is the longest response in tokens."""
    if not any(reward.adds for reward in rewards):
        raise ValueError("every reward has a gate or weight 0, so there is nothing to make a score of")
    if any((reward.name or reward.use) == "overlong" for reward in rewards):
        raise ValueError("overlong is the name of the penalty in scores: give the reward another `name:`")
    if scoring.overlong is not None and scoring.overlong.buffer > longest:
        raise ValueError(
            f"scoring.overlong.buffer {scoring.overlong.buffer} is above sampling.max_new_tokens {longest}: every"
            " response would be too long"
        )


def check_retrying(rewards: Sequence[RewardSpec], worker: RewardWorkerConfig, max_hold: float) -> None:
    """Raise ValueError if retries (on_failure retry) go on for longer than a sample may be held."""
    retries = any((reward.on_failure or worker.on_failure) == "retry" for reward in rewards)
    if retries and worker.retry_for >= max_hold:
        raise ValueError(
            f"reward_worker.retry_for {worker.retry_for:g} s is not below lease.max_hold {max_hold:g} s, after which a"
            " sample has failed"
        )
