"""The typed configuration of a run: every key with its type, range, default and meaning.

This module imports nothing heavy and knows nothing of the roles; `streamrl.runfile` reads and writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from streamrl.config.base import (
    MODEL,
    SERVER_KINDS,
    Duration,
    Fraction,
    Natural,
    Positive,
    Section,
    ServerKind,
    ServerUrl,
    Size,
    StoreUrl,
)
from streamrl.config.data import DataConfig as DataConfig
from streamrl.config.data import SourceConfig as SourceConfig
from streamrl.config.episode import EpisodeConfig as EpisodeConfig
from streamrl.config.learner import CheckpointConfig, LearnerConfig
from streamrl.config.rewards import ArchiveConfig as ArchiveConfig
from streamrl.config.rewards import RewardModelConfig as RewardModelConfig
from streamrl.config.rewards import RewardModelName, check_retrying, check_scoring
from streamrl.config.rewards import RewardSpec as RewardSpec
from streamrl.config.rewards import RewardWorkerConfig as RewardWorkerConfig
from streamrl.config.rewards import ScoringConfig as ScoringConfig
from streamrl.config.sampling import OPTIONS, SGLANG_MASK, DrawConfig
from streamrl.config.sampling import EvaluationConfig as EvaluationConfig
from streamrl.config.sampling import SamplingConfig as SamplingConfig


class RedisConfig(Section):
    """Where the queue lives. Without a URL the run starts its own server inside its directory."""

    url: str | None = Field(None, description="redis://, rediss:// or unix:// URL; empty: an embedded server")
    password_file: Path | None = Field(None, description="file with the password, so that it is in no URL and no argv")
    maxmemory: Size = Field(1 << 30, description="memory limit of the embedded server")
    patience: Duration = Field(60.0, description="how long a role waits for Redis to come back before it exits 69")
    fsync_period: Duration = Field(
        2.0, description="time after which a write is on disk (appendfsync everysec); waited once per learner start"
    )


class ModelConfig(Section):
    """The policy: any Hugging Face causal language model."""

    path: Annotated[str, MODEL] = Field(
        "model", description="directory or hub name of the model that training starts from"
    )
    tokenizer: Annotated[str | None, MODEL] = Field(
        None, description="directory or hub name of the tokenizer; empty: the model's"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the weights while training")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of the learner")
    context: Positive = Field(2048, description="longest prompt plus response in tokens")
    chat_template: Path | None = Field(None, description="file of the chat template; empty: the tokenizer's own")
    template_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the chat template, `enable_thinking: false` for example"
    )
    system_prompt: str | None = Field(None, description="put before each chat that begins with no system message")
    image_processor: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of a vision-language model's image processor that replace its own, `size` for example",
    )

    @property
    def renders(self) -> bool:
        """Whether chats are written in another way than the tokenizer's own template does by itself."""
        return self.chat_template is not None or bool(self.template_args)


class ImagesConfig(Section):
    """What prompts, tools and agents may show to a vision-language model (docs/guides/images.md)."""

    largest: Size = Field(8 << 20, description="bytes of one encoded image, at most")
    pixels: Positive = Field(1 << 24, description="width times height of one image, at most")
    inline: Natural = Field(
        16 << 10, description="images of up to so many bytes travel with their group through Redis; larger are files"
    )
    url: StoreUrl | None = Field(
        None, description="store for these files (s3://, gs://, a directory); empty: the run directory"
    )


class EngineConfig(Section):
    """What generates: servers, each with a role `engine.N`, or transformers in the rollout workers."""

    kind: Literal["hf", ServerKind, "openai"] = Field(
        "hf",
        description="hf: transformers in the replica's process;"
        " vllm, sglang: servers that streamrl starts, or those at `url`;"
        " openai: any completions API at `url`, with weights of its own",
    )
    url: tuple[ServerUrl, ...] = Field((), description="servers that run already, one for each role engine.N")
    servers: Positive = Field(1, description="roles engine.N, each of which starts a server (vllm, sglang)")
    host: str = Field(
        "127.0.0.1", description="address on which servers that streamrl starts listen; other hosts need another one"
    )
    environment: Path | None = Field(
        None,
        description="virtual environment of the server; empty: .engines/KIND, from `streamrl engines install`",
    )
    flags: dict[str, Any] = Field(
        default_factory=dict,
        description="flags of the server without dashes, passed through: `max-num-seqs: 64`; true: bare; openai:"
        " `model`, `processed-logprobs`, what a server can do",
    )
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables of the server")
    devices: tuple[str, ...] = Field((), description="cards of each server in turn, as `0,1`; empty: free ones")
    tensor_parallel: Positive = Field(1, description="devices (CPU: processes) that one server spreads the model over")
    api_key_file: Path | None = Field(None, description="file with the key of the servers; it is in no argv and no log")
    start_deadline: Duration = Field(600.0, description="longest time from the start of a server to its first answer")
    stream_interval: Positive = Field(32, description="tokens between two messages of a server")
    slots: Positive = Field(64, description="responses decoded at the same time, at most")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of the engine")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the weights while generating")
    device: str = Field(
        "auto", description="auto (a GPU when there is one), cpu, cuda or cuda:N; a GPU that is missing is refused"
    )
    threads: Positive | None = Field(
        None, description="CPU threads of each engine; empty: its share of the cores, as `up --dry-run` shows"
    )
    kv_cache: Size = Field(
        1 << 30,
        description="memory of the keys and values; where it is short, fewer than `slots` responses are decoded",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_decode(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "decode" in keys:
            raise ValueError(
                "engine.decode is gone, there is one decode loop: leave it out, or use kind vllm or sglang"
            )
        return keys

    @property
    def managed(self) -> bool:
        """Whether streamrl starts the servers."""
        return self.kind in SERVER_KINDS and not self.url

    @model_validator(mode="after")
    def _check_servers(self) -> EngineConfig:
        if self.kind == "hf" and self.url:
            raise ValueError(
                "engine.url with kind hf named servers of `engines serve`, which is gone: leave it out, and start"
                " `streamrl run rollout --run REDIS_URL#RUN` on each host that is to generate"
            )
        if self.kind == "openai" and not self.url:
            raise ValueError("engine.kind openai needs engine.url: streamrl starts no such server")
        if self.url and self.servers > 1:
            raise ValueError("engine.servers counts servers that streamrl starts; with engine.url it starts none")
        if len(set(self.url)) != len(self.url):
            raise ValueError("engine.url names a server twice")
        started: tuple[str, ...] = ("environment", "flags", "variables", "devices")
        if self.kind == "openai":  # its flags say what a server can do that streamrl does not start
            started = ("environment", "variables", "devices")
        if not self.managed and (unused := [name for name in started if getattr(self, name)]):
            raise ValueError(f"engine.{unused[0]} is of servers that streamrl starts (kind vllm or sglang, no url)")
        if self.kind == "hf" and (self.servers > 1 or self.tensor_parallel > 1):
            raise ValueError("engine.servers and engine.tensor_parallel are of servers; hf generates in the replica")
        if self.kind == "hf" and self.api_key_file is not None:
            raise ValueError("engine.api_key_file is of servers; hf generates in the replica")
        return self


class RolloutConfig(Section):
    """Rollout workers."""

    replicas: Positive = Field(1, description="number of workers the supervisor starts")
    placement: Literal["standalone", "colocated"] = Field(
        "standalone",
        description="standalone: engines have their own devices; colocated: they share them with the learner, in turn",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_host(cls, values: Any) -> Any:
        if isinstance(values, dict) and "host" in values:
            raise ValueError("host was for role agent, which is gone: leave it out, replicas run the episodes")
        return values


class LeaseConfig(Section):
    """How roles lease work (docs/internals/ledger.md, leases)."""

    seconds: Duration = Field(15.0, description="a holder that is silent for this long has lost its work")
    max_hold: Duration = Field(900.0, description="longest time one piece of work may be held and renewed")
    max_deliveries: Annotated[int, Field(ge=3)] = Field(
        4, description="deaths that work may be to blame for before it is dead; from the third holder on it runs alone"
    )


Quantize = Literal["fp8_block", "fp8_channel", "int8"]


class DeltaConfig(Section):
    """Versions that carry only the changed values (docs/internals/weights.md)."""

    enabled: bool = Field(False, description="publish deltas between full versions; worth it with dtype bfloat16")
    every: Positive = Field(20, description="versions from one full version (anchor) to the next")
    max_density: Fraction = Field(0.1, description="share of changed values above which a version is whole")


class WeightsConfig(Section):
    """How versions of the weights reach the engines."""

    transport: Literal["shm", "directory", "http", "collective"] = Field(
        "shm",
        description="shm: /dev/shm of this host; directory: run's; http: pulled from the learner's host; collective:"
        " http, and broadcast by gloo or NCCL to vLLM and SGLang servers",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type on the way")
    quantize: Quantize | None = Field(
        None,
        description="servers generate with weights and activations of 8 bits, made when a version is published"
        " (docs/guides/speed-and-memory.md); empty: with weights as they are trained",
    )
    shard_bytes: Size = Field(256 << 20, description="largest shard file, which is also a bucket of the transports")
    deadline: Duration = Field(120.0, description="longest time to publish or apply a version, and of a decode step")
    delta: DeltaConfig = Field(default_factory=DeltaConfig)
    host: str = Field("127.0.0.1", description="address that the learner's host listens on (http, collective)")
    port: Natural = Field(0, description="port of the http transport; 0: any free one")
    url: str | None = Field(
        None,
        description="store of fsspec (s3://..., gs://..., a shared directory) to which the learner's host copies each"
        " version, and from which many hosts pull it (transport http)",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_relay(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "relay" in keys:
            raise ValueError("relay is gone: leave it out, and set url to an object store if many hosts pull")
        return keys

    @model_validator(mode="after")
    def _check_keys(self) -> WeightsConfig:
        if self.url is not None and self.transport != "http":
            raise ValueError(f"weights.url is for transport http, not {self.transport}")
        if self.quantize is not None and self.delta.enabled:
            raise ValueError("weights.quantize makes whole versions: leave out weights.delta")
        return self

    @model_validator(mode="after")
    def _check_delta(self) -> WeightsConfig:
        if self.delta.enabled and self.transport == "collective":
            raise ValueError(
                "transport collective broadcasts whole versions: leave out weights.delta, or set transport http"
            )
        return self

    @property
    def pulled(self) -> bool:
        """Replicas fetch versions over the network, instead of reading the files of the learner's host."""
        return self.transport not in ("shm", "directory")


class RecordingConfig(Section):
    """Rollouts without a learner, and a learner without rollouts (docs/guides/recordings.md)."""

    mode: Literal["off", "write", "read"] = Field(
        "off",
        description="write: complete groups go to RUN_DIR/recording, nothing is trained (up --rollout-only); read: the"
        " groups of `path` are trained, nothing is generated (up --train-only)",
    )
    path: Path | None = Field(None, description="recording to read: a file, or a directory with all its files")
    file_bytes: Size = Field(256 << 20, description="size at which a file of a recording is followed by the next")


class SupervisorConfig(Section):
    """How `streamrl up` restarts and ends roles."""

    max_restarts: Natural = Field(10, description="restarts of one role within the window before the run fails")
    window: Duration = Field(600.0, description="time over which restarts are counted")
    backoff: Duration = Field(0.5, description="first pause before a restart, doubled each time, full jitter")
    max_backoff: Duration = Field(30.0, description="longest pause before a restart")
    start_deadline: Duration = Field(
        300.0,
        description="longest time from start to ready of one role; an engine also has engine.start_deadline",
    )
    drain_deadline: Duration = Field(60.0, description="longest time of the whole drain after the first Ctrl-C")
    liveness_deadline: Duration = Field(60.0, description="a ready role whose event loop is silent this long is killed")
    term_grace: Duration = Field(10.0, description="time between SIGTERM and SIGKILL when a role has to go")
    log_bytes: Size = Field(
        32 << 20, description="size at which the log file of a role is rotated; one old file is kept"
    )


class HealthConfig(Section):
    """Where each role serves `/livez`, `/readyz` and `/metrics`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port; 0: any free one, as roles that share a host need it")
    token_file: Path | None = Field(
        None, description="file with the bearer token of /metrics; empty: RUN_DIR/health.token; the other two are open"
    )


class Resources(Section):
    """What one process of a role asks of a cluster."""

    cpus: NonNegativeFloat = Field(0.0, description="cores")
    gpus: NonNegativeFloat = Field(0.0, description="accelerators; a part of one is possible")
    custom: dict[str, NonNegativeFloat] = Field(default_factory=dict, description="custom resources of Ray by name")


class ClusterConfig(Section):
    """Where `streamrl up --on ray` places the roles."""

    address: str | None = Field(
        None,
        description="of the Ray cluster; local: a new one on this machine; null: RAY_ADDRESS, else the cluster of this"
        " machine, else a new one",
    )
    resources: dict[str, Resources] = Field(
        default_factory=dict,
        description="of each process by role (learner, engine, rollout, reward, feeder, reward_model); without an entry"
        " a role asks for a GPU for each device if its device is cuda",
    )

    @model_validator(mode="after")
    def _check_roles(self) -> ClusterConfig:
        known = ("learner", "engine", "rollout", "reward", "feeder", "reward_model", "recorder", "player")
        if unknown := sorted(set(self.resources) - set(known)):
            raise ValueError(f"cluster.resources names no role by {unknown[0]}; roles: {', '.join(known)}")
        return self


class RunConfig(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name; keys in Redis carry it")
    seed: Natural = Field(0, description="seed of data order, sampling and initialisation")
    max_staleness: Natural = Field(1, description="steps a prompt may be admitted ahead of the learner")
    max_dead: Positive = Field(1000, description="dead letters, of training or held-out prompts, that end the run")
    redis: RedisConfig = Field(default_factory=RedisConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    lease: LeaseConfig = Field(default_factory=LeaseConfig)
    episode: EpisodeConfig = Field(default_factory=EpisodeConfig)
    rewards: tuple[RewardSpec, ...] = Field((RewardSpec(use="exact_match"),), min_length=1)
    plugin_paths: tuple[Path, ...] = Field(
        (), description="directories in which `module:Name` plug-ins are looked for; the run file's own comes first"
    )
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    reward_worker: RewardWorkerConfig = Field(default_factory=RewardWorkerConfig)
    reward_models: dict[RewardModelName, RewardModelConfig] = Field(
        default_factory=dict, description="models that rewards ask over HTTP, by name"
    )
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    recording: RecordingConfig = Field(default_factory=RecordingConfig)
    supervisor: SupervisorConfig = Field(default_factory=SupervisorConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)

    def drawing(self, *, evaluation: bool) -> DrawConfig:
        """How responses are drawn: those that are trained, or held-out ones."""
        if not evaluation:
            return self.sampling
        own = self.evaluation.model_dump(include=OPTIONS, exclude_none=True)
        return DrawConfig.model_construct(**{**self.sampling.model_dump(include=OPTIONS), **own})

    @property
    def reads_text(self) -> bool:
        """Whether engines have to know texts, and not only token ids."""
        draws = self.sampling, self.drawing(evaluation=True)
        return bool(self.episode.agent or self.episode.run) or any(draw.stop or draw.min_tokens for draw in draws)

    @property
    def budget(self) -> int:
        """Groups admitted and not yet trained, at most (promise 2)."""
        return (self.max_staleness + 1) * self.learner.groups_per_step

    @property
    def hard_cap(self) -> int:
        """Live groups in all, at most; also after a restart and while checkpoints fail (promise 2)."""
        intervals = 2 if self.checkpoint.background else 1
        return self.budget + intervals * self.checkpoint.every * self.learner.groups_per_step

    def checkpoint_due(self, steps: int, held: int) -> bool:
        """Whether the learner has to save: `steps` since the last checkpoint, `held` trained groups still in Redis.

        At their share of the hard cap admission stops until they are retired.
        """
        return steps > 0 and (steps >= self.checkpoint.every or held >= self.hard_cap - self.budget)

    @property
    def token_staleness_limit(self) -> int:
        """Steps a token may be old when the learner takes its group (promise 3); recorded ones only get older."""
        limit = self.learner.max_token_staleness
        if limit is None and self.recording.mode == "read":
            return sys.maxsize
        return 4 * (self.max_staleness + self.learner.publish_every) if limit is None else limit

    def resources(self, kind: str) -> Resources:
        """What one process of a role asks of a cluster: as configured, else the devices that it is set to use."""
        if kind in self.cluster.resources:
            return self.cluster.resources[kind]
        engine = self.engine
        gpus = 0
        if kind == "learner" and self.learner.device == "cuda":
            gpus = 1
        elif kind == ("engine" if self.engines else "rollout") and engine.device == "cuda" and not engine.url:
            gpus = engine.tensor_parallel
        return Resources(gpus=gpus)

    @property
    def engines(self) -> int:
        """How many roles `engine.N` the run begins with; 0: the rollout workers generate by themselves, or nobody."""
        if self.engine.kind == "hf" or self.recording.mode == "read":
            return 0
        return len(self.engine.url) or self.engine.servers

    @property
    def reward_servers(self) -> dict[str, int]:
        """How many servers streamrl starts of each reward model that has no URL; none where nothing is scored."""
        if self.recording.mode == "read":
            return {}
        return {name: model.servers for name, model in self.reward_models.items() if model.managed}

    @property
    def turn_deadline(self) -> float:
        """Seconds that the learner waits for devices it shares: a server on them may be loading its model."""
        loads = [model.start_deadline for model in self.reward_models.values() if model.sleep and model.managed]
        if self.engine.managed:
            loads.append(self.engine.start_deadline)
        return self.weights.deadline + max(loads, default=0.0)

    @property
    def slots(self) -> int:
        """Responses that all engines of the run decode at the same time, at most."""
        return self.engine.slots * (self.engines or self.rollout.replicas)

    @model_validator(mode="after")
    def _check_engines(self) -> RunConfig:
        asked = self.cluster.resources
        if self.engines and "engine" not in asked and "rollout" in asked and asked["rollout"].gpus:
            raise ValueError("cluster.resources.rollout asks for GPUs, and role engine generates: name engine instead")
        if self.rollout.placement == "colocated" and self.engine.kind == "openai":
            raise ValueError("rollout.placement colocated: engine.kind openai cannot leave its devices to the learner")
        if self.rollout.placement == "colocated" and self.weights.transport == "collective":
            raise ValueError("rollout.placement colocated: engines are on the learner's host: weights.transport shm")
        sleeping = [name for name, model in self.reward_models.items() if model.sleep]
        if sleeping and self.rollout.placement != "colocated":
            raise ValueError(
                f"reward_models.{sleeping[0]}.sleep is for rollout.placement colocated: servers no longer sleep without"
                " work, so leave it out"
            )
        return self

    def untold(self, draw: DrawConfig) -> tuple[str, str]:
        """The option of a draw whose log-probabilities the engines do not tell, why and what helps; empty: none."""
        kind = self.engine.kind
        changed = draw.cuts or ("min_tokens" if draw.min_tokens else "temperature" if draw.temperature != 1 else "")
        if kind == "openai" and changed and not self.engine.flags.get("processed-logprobs"):
            return changed, (
                "the log-probabilities of an openai server may not be those of what it sampled from; leave it out, set"
                " engine.flags processed-logprobs if they are"
            )
        if kind == "sglang" and draw.cuts and not (self.sampling.cuts and 0 < draw.top_k <= SGLANG_MASK):
            return draw.cuts, (
                "sglang tells the log-probabilities of what it sampled from only with sampling.top_k 1 to"
                f" {SGLANG_MASK}; set it too"
            )
        return "", ""

    @model_validator(mode="after")
    def _check_sampling(self) -> RunConfig:
        """Refuse what cannot be trained: the log-probabilities must be those of the distribution that was sampled."""
        kind, sampling = self.engine.kind, self.sampling
        draws = {"sampling": sampling, "evaluation": self.drawing(evaluation=True)}
        for name, draw in draws.items():
            if draw.max_new_tokens >= self.model.context:
                raise ValueError(f"{name}.max_new_tokens leaves no room for a prompt in model.context")
            if draw.min_tokens > draw.max_new_tokens:
                raise ValueError(f"{name}.min_tokens is more than {name}.max_new_tokens")
        option, why = self.untold(sampling)
        if option:
            raise ValueError(f"sampling.{option}: {why}, or set evaluation.{option} instead")
        if kind == "sglang" and (seeded := next((name for name, draw in draws.items() if draw.seed is not None), "")):
            raise ValueError(f"{seeded}.seed: sglang draws for all responses by one seed; use engine.kind hf or vllm")
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> RunConfig:
        """Refuse versions that are an adapter where they cannot arrive; `merged` works everywhere."""
        lora, kind = self.learner.lora, self.engine.kind
        if not lora.alone:
            return self
        if kind not in SERVER_KINDS:
            raise ValueError(f"learner.lora.publish adapter: engine.kind {kind} loads no adapters; set publish: merged")
        if self.weights.delta.enabled:
            raise ValueError("learner.lora.publish adapter: such versions are small; weights.delta is for merged ones")
        if lora.dora:
            raise ValueError(f"learner.lora.publish adapter: {kind} loads no DoRA adapters; set publish: merged")
        if kind == "vllm" and lora.rank > 512:
            raise ValueError("learner.lora.publish adapter: vllm loads ranks up to 512; set publish: merged")
        return self

    @model_validator(mode="after")
    def _check_quantize(self) -> RunConfig:
        kind, engine = self.weights.quantize, self.engine.kind
        if kind is None:
            return self
        if engine not in SERVER_KINDS:
            raise ValueError(f"weights.quantize: engine.kind {engine} takes no such weights; use vllm, or leave it out")
        if engine == "sglang" and kind != "fp8_block":
            raise ValueError(
                f"weights.quantize {kind}: sglang transposes such weights when it starts and takes no second version;"
                " use fp8_block, or engine.kind vllm"
            )
        for flag in self.engine.flags:
            if flag.lstrip("-").replace("_", "-").partition(".")[0] in {"hf-overrides", "json-model-override-args"}:
                raise ValueError(f"weights.quantize sets this flag itself: leave out engine.flags.{flag}")
        if self.learner.lora.alone:
            raise ValueError("weights.quantize: an adapter alone is not quantised; set learner.lora.publish merged")
        if self.learner.correction.base == "uncorrected":
            raise ValueError(
                "weights.quantize: the policy that samples is not the one that is trained, and"
                " learner.correction.base uncorrected ignores that; use decoupled, which truncates ratios at 2"
            )
        return self

    @model_validator(mode="after")
    def _check_recording(self) -> RunConfig:
        recording = self.recording
        if (recording.mode == "read") != (recording.path is not None):
            raise ValueError("recording.path names what recording.mode read reads: set both, or none")
        if recording.mode == "read" and self.evaluation.every:
            raise ValueError("recording.mode read has no engines to evaluate with: set evaluation.every to 0")
        if recording.mode != "off" and self.data.curriculum is not None:
            raise ValueError("data.curriculum needs a learner and a feeder: set recording.mode to off, or leave it out")
        if recording.mode != "off" and self.rollout.placement == "colocated":
            raise ValueError(
                "rollout.placement colocated shares devices between engines and learner: set recording.mode to off"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> RunConfig:
        check_scoring(self.rewards, self.scoring, self.sampling.max_new_tokens)
        check_retrying(self.rewards, self.reward_worker, self.lease.max_hold)
        return self

    @model_validator(mode="after")
    def _check_episode(self) -> RunConfig:
        episode = self.episode
        if episode.kind is not None and 2 * episode.deadline > self.lease.max_hold:
            raise ValueError(
                f"episode.deadline is {episode.deadline:g} s, and a prompt is held for {self.lease.max_hold:g} s, in"
                f" which an episode may also wait for another to end: set lease.max_hold to {2 * episode.deadline:g}s"
                " or more"
            )
        return self

    @model_validator(mode="after")
    def _check_baseline(self) -> RunConfig:
        use, greedy = self.learner.advantage.use, self.sampling.greedy_baseline
        if use == "remax" and not greedy:
            raise ValueError(
                "learner.advantage.use remax needs the reward of a greedy response: set sampling.greedy_baseline"
            )
        if greedy and use != "remax" and ":" not in use:
            raise ValueError("sampling.greedy_baseline gives rewards that only learner.advantage.use remax reads")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> RunConfig:
        sampling = self.sampling
        if sampling.min_group > sampling.group_size:
            raise ValueError("sampling.min_group is larger than sampling.group_size: every group would be dead")
        if self.learner.groups_per_step < self.learner.ranks:
            raise ValueError("learner.groups_per_step is below learner.ranks: a rank would have nothing to train")
        if self.learner.ranks > 1 and self.learner.collective_deadline <= self.redis.patience:
            raise ValueError("learner.collective_deadline is not above redis.patience, which one rank may wait alone")
        if self.learner.reference.kind == "remote" and sampling.temperature != 1:
            raise ValueError(
                "learner.reference.kind remote: servers score a prompt at temperature 1, sampling.temperature is"
                f" {sampling.temperature}"
            )
        if self.token_staleness_limit < self.max_staleness + self.learner.publish_every - 1:
            raise ValueError(
                "learner.max_token_staleness is below max_staleness + learner.publish_every - 1: groups of the usual"
                " age would be dropped"
            )
        if self.data.epochs is not None and self.data.weights and self.recording.mode != "read":
            raise ValueError("data.epochs: sources with weights end at different times; set learner.steps instead")
        if self.evaluation.every and not self.data.held_out:
            raise ValueError("evaluation.every is set, but data.held_out names no prompts")
        if self.learner.stop_at_accuracy is not None and not self.evaluation.every:
            raise ValueError("learner.stop_at_accuracy needs evaluation.every")
        names = [reward.name or reward.use for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError("two rewards have the same name: give them `name:`")
        need = self.hard_cap * sampling.responses * (9 * self.model.context + 2048)
        if self.redis.url is None and need * 1.3 > self.redis.maxmemory:
            raise ValueError(
                f"redis.maxmemory {self.redis.maxmemory >> 20} MiB may not hold {self.hard_cap} groups of"
                f" {sampling.responses} samples with {self.model.context} tokens; set it to {int(need * 1.3) >> 20}MiB"
            )
        return self
