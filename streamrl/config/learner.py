"""The learner's sections: which algorithm, with which corrections, and how it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamrl.config.base import MODEL, Duration, Fraction, Natural, Positive, Section, ServerUrl, StoreUrl

Coefficient = Annotated[float, Field(ge=0)]
Preset = Literal[
    "grpo",
    "ppo",
    "egpo",
    "egpo_zhao",
    "scalerl",
    "kpop",
    "ipo",
    "sao",
    "flash_reinforce",
    "high_staleness",
    "on_policy",
]


class AdvantageConfig(Section):
    """How rewards become advantages (docs/reference/advantages.md)."""

    use: str = Field("grpo", description="name of an estimator, or module:name of your own")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the estimator")
    zero_variance: Literal["keep", "drop", "resample"] = Field(
        "keep",
        description="a group with equal rewards: keep counts its tokens in the mean; drop leaves them out; resample"
        " leaves it out and waits for another group in its place",
    )


class LossConfig(Section):
    """The policy loss (docs/reference/losses.md)."""

    use: str = Field("ppo", description="name of a loss, or module:name of your own")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the loss: clip_low, ...")
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = Field(
        "token_mean",
        description="mean over the tokens of the step; mean over responses of their means; mean over prompts of the"
        " means over the tokens of their responses; sum over tokens divided by responses x sampling.max_new_tokens",
    )
    truncated: Literal["train", "mask"] = Field(
        "train",
        description="responses that a limit ended: mask gives them no policy gradient, and their rewards still count in"
        " the baseline",
    )
    entropy: float = Field(0.0, description="coefficient of the entropy bonus; 0: none")


class GateConfig(Section):
    """One gate on importance ratios: a weight that is cut, or a mask (docs/reference/corrections.md)."""

    use: str = Field(
        description="tis, icepop, mask, veto, opsm, m2po, binary_kl, tv, clip_cov, top_entropy, or module:name of your"
        " own"
    )
    level: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="ratio of a token, of the whole response, or its geometric mean over the response; empty: the"
        " gate's default",
    )
    low: float | None = Field(None, ge=0, description="lower bound; empty: the gate's default")
    high: float | None = Field(None, gt=0, description="upper bound; empty: the gate's default")
    tighten: Coefficient = Field(
        0.0, description="log bounds are divided by 1 + tighten x staleness of the token, in steps"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments of the gate")

    @model_validator(mode="after")
    def _refuse_over(self) -> GateConfig:
        if self.use == "m2po" and "over" in self.args:
            raise ValueError("over of m2po is gone: leave it out, the tokens of a micro-batch decide")
        return self


class CorrectionConfig(Section):
    """What the old policy is, and what stands between the sampling policy and the gradient."""

    base: Literal["decoupled", "bypass", "prox_approx", "uncorrected"] = Field(
        "decoupled",
        description="old policy: decoupled: of the start of the step; bypass: the one that sampled; prox_approx:"
        " between them, by the token's staleness; uncorrected: as decoupled, and the one that sampled is ignored",
    )
    gates: tuple[GateConfig, ...] | None = Field(
        None, description="all are applied; empty: tis and veto with decoupled and prox_approx, veto with bypass"
    )
    lr_scale: Literal["none", "ess", "staleness"] = Field(
        "none",
        description="learning rate times the square root of the normalised effective sample size, or times"
        " 1 / sqrt(1 + mean staleness in steps)",
    )
    exact_on_policy_ratio: bool = Field(
        False,
        description="tokens of staleness 0 have the ratio 1: what engine and learner compute differently from the same"
        " weights does not count",
    )


class KlConfig(Section):
    """Distance to the reference policy."""

    where: Literal["none", "reward", "loss"] = Field("none", description="what the KL term is added to")
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = Field(
        "k3", description="estimator per token; with +: its value, and the gradient of k2 (straight through)"
    )
    unbiased: bool = Field(False, description="multiply by the importance weight of the token (off-policy form)")
    coefficient: Coefficient = Field(0.001, description="factor; the first one with controller adaptive")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: steer the KL to `target`")
    target: Annotated[float, Field(gt=0)] = Field(0.1, description="KL per token that adaptive aims at")
    horizon: Positive = Field(10_000, description="responses over which adaptive corrects")


class CriticConfig(Section):
    """The value function, for GAE."""

    kind: Literal["none", "model"] = Field("none", description="model: a model of its own")
    path: Annotated[str | None, MODEL] = Field(None, description="model that the critic starts from; empty: model.path")
    lr: Annotated[float, Field(gt=0)] = Field(1e-5, description="learning rate of the critic")
    clip: Coefficient = Field(
        0.5, description="values move at most this far from those of the start of the step; 0: as far as they like"
    )
    warmup_steps: Natural = Field(0, description="first steps in which only the critic learns")
    updates_per_step: Positive = Field(1, description="updates of the critic for each one of the policy")
    freeze: Literal["none", "attention"] = Field(
        "none", description="attention: the attention layers of the critic stay as they were loaded"
    )
    gamma: Fraction = Field(1.0, description="discount per token")
    lam: Fraction = Field(
        1.0, description="lambda of the returns that the critic learns; the policy's too, unless advantage.args has lam"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_head(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("kind") == "head":
            raise ValueError("kind head (a value head on the policy) is gone: set kind to model, a critic of its own")
        if "coefficient" in values:
            raise ValueError("coefficient weighed the loss of kind head, which is gone: leave it out")
        return values


class ReferenceConfig(Section):
    """The reference policy of the KL."""

    kind: Literal["none", "frozen", "base", "remote"] = Field(
        "none", description="frozen: a copy; base: the policy without its adapter (LoRA); remote: servers at `url`"
    )
    path: Annotated[str | None, MODEL] = Field(None, description="model of the copy; empty: model.path")
    offload: bool = Field(True, description="the copy is on the host while it is not used")
    url: tuple[ServerUrl, ...] = Field((), description="vLLM or SGLang servers that hold the reference")
    api_key_file: Path | None = Field(None, description="file with the key of those servers; it is in no argv or log")
    deadline: Duration = Field(
        60.0, description="longest time for the log-probabilities of one micro-batch, of all attempts at all servers"
    )


class LoraConfig(Section):
    """Training an adapter instead of all weights."""

    rank: Natural = Field(0, description="rank of the adapter; 0: all weights are trained")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="scale: alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field("all-linear", description="names of adapted modules")
    dora: bool = Field(False, description="weight-decomposed (DoRA)")
    publish: Literal["merged", "adapter"] = Field(
        "merged", description="versions hold all weights with the adapter merged in, or the adapter alone"
    )

    @property
    def alone(self) -> bool:
        """Whether versions of the weights are an adapter alone."""
        return bool(self.rank) and self.publish == "adapter"

    @model_validator(mode="after")
    def _check_rank(self) -> LoraConfig:
        # By values: a saved configuration names every key.
        if not self.rank and self != LoraConfig.model_construct():
            raise ValueError("learner.lora trains no adapter without learner.lora.rank")
        return self


class LearnerConfig(Section):
    """The learner: FSDP over any number of ranks."""

    preset: Preset | None = Field(
        None, description="an algorithm by name; keys that are set win (docs/reference/presets/index.md)"
    )
    ranks: Positive = Field(1, description="processes; each holds an equal share of every parameter")
    groups_per_step: Positive = Field(8, description="complete groups in one step")
    passes: Positive = Field(1, description="times that each step goes over its groups")
    mini_batches: Positive = Field(1, description="updates per pass: the groups of a step are dealt out to so many")
    publish_every: Positive = Field(
        1, description="steps between published versions; a learner that waits for groups publishes earlier"
    )
    steps: Positive | None = Field(None, description="steps of the run; empty: until data.epochs are over")
    stop_at_accuracy: Fraction | None = Field(None, description="end when held-out accuracy reaches this")
    lr: Annotated[float, Field(gt=0)] = Field(1e-6, description="AdamW learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warm-up; linear and cosine end at lr_floor x lr at `steps`"
    )
    lr_floor: Fraction = Field(0.0, description="share of lr at the end of the schedule")
    warmup_steps: Natural = Field(0, description="steps of linear warm-up")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW weight decay")
    clip_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="gradient norm limit")
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="decay per step of an average of the weights, which is exported beside them; 0: none"
    )
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl: KlConfig = Field(default_factory=KlConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    order: Literal["oldest", "strict"] = Field(
        "oldest", description="oldest: oldest complete groups; strict: wait for the oldest live groups"
    )
    max_token_staleness: Natural | None = Field(
        None,
        description="a group with a token older than this many steps is dropped; empty:"
        " 4 x (max_staleness + publish_every)",
    )
    tokens_per_microbatch: Positive = Field(4096, description="tokens, padding included, of one forward pass per rank")
    logprob_chunk: Positive = Field(2048, description="tokens whose logits exist at the same time")
    checkpoint_activations: bool = Field(False, description="recompute activations of layers in the backward pass")
    offload: tuple[Literal["parameters", "optimizer"], ...] = Field(
        (), description="what lies on the host while it is not computed with"
    )
    compile: bool = Field(False, description="torch.compile the layers")
    head_float32: bool = Field(False, description="compute the output layer in float32 (model.dtype bfloat16)")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch float32 matmul precision; medium uses oneDNN on CPUs, with model.attention eager"
    )
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="where the figures of each step go besides metrics/learner.0.jsonl; extras of the package"
    )
    device: str = Field("auto", description="auto, cpu or cuda")
    train_vision: bool = Field(
        False, description="train the vision tower, too, and the layers that bring its features to the text model"
    )
    threads: Positive | None = Field(
        None, description="CPU threads of each rank; empty: its share of the cores, as `up --dry-run` shows"
    )
    collective_deadline: Duration = Field(300.0, description="longest wait of one rank for the others")
    max_group_crashes: Positive = Field(3, description="learner crashes in steps with a group before it is dead")

    @model_validator(mode="before")
    @classmethod
    def _refuse_gone(cls, values: Any) -> Any:
        if isinstance(values, dict) and "sinks" in values:
            raise ValueError("sinks is now report_to: write learner.report_to")
        if isinstance(values, dict) and values.get("matmul_precision") == "auto":
            raise ValueError(
                "matmul_precision auto is gone: leave it out, or set medium with model.attention eager (no AMX)"
            )
        if isinstance(values, dict) and (gone := {"rows", "share_prompts"} & values.keys()):
            raise ValueError(
                f"{min(gone)} is gone: leave it out, rows are packed and prompts shared wherever that is less work"
            )
        return values

    @model_validator(mode="after")
    def _check_algorithm(self) -> LearnerConfig:
        """Refuse what would silently drop a correction or a part of the algorithm."""
        base, gates = self.correction.base, self.correction.gates
        if base in {"decoupled", "prox_approx"} and gates == ():
            raise ValueError(
                f"learner.correction.base {base} without gates forgets the policy that sampled: add a gate (tis), or"
                " say so with base: uncorrected"
            )
        if base == "uncorrected" and gates:
            raise ValueError("learner.correction.base uncorrected has no gates: take decoupled")
        if self.kl.where != "none" and self.reference.kind == "none":
            raise ValueError("learner.kl.where needs a reference policy: set learner.reference.kind")
        if self.reference.kind == "base" and not self.lora.rank:
            raise ValueError("learner.reference.kind base is the policy without adapter: set learner.lora.rank")
        if self.reference.kind == "remote" and not self.reference.url:
            raise ValueError("learner.reference.kind remote needs learner.reference.url")
        if self.reference.kind == "remote" and self.reference.deadline >= self.collective_deadline:
            raise ValueError("learner.reference.deadline is not below learner.collective_deadline: ranks would give up")
        if self.advantage.use == "gae" and self.critic.kind == "none":
            raise ValueError("learner.advantage.use gae needs values: set learner.critic.kind")
        if self.critic.kind != "none" and self.advantage.use != "gae" and ":" not in self.advantage.use:
            raise ValueError("learner.critic.kind gives values that only learner.advantage.use gae reads")
        if self.schedule != "constant" and self.steps is None:
            raise ValueError(f"learner.schedule {self.schedule} needs its end: set learner.steps")
        if self.mini_batches > self.groups_per_step:
            raise ValueError("learner.mini_batches is above learner.groups_per_step: some would be empty")
        return self


class CheckpointConfig(Section):
    """Durable checkpoints."""

    every: Positive = Field(10, description="steps between checkpoints")
    keep: Positive = Field(2, description="newest checkpoints kept")
    keep_every: Natural = Field(
        0, description="the first checkpoint at or after each multiple of so many steps is kept as well; 0: none"
    )
    background: bool = Field(True, description="write while training goes on; the hard cap counts one interval more")
    deadline: Duration = Field(
        1800.0,
        description="longest time to write one, after which the learner ends with an error; with a store a start may"
        " take so much longer, to bring one",
    )
    store: StoreUrl | None = Field(
        None,
        description="directory or URL (s3://, gs://, az://) in which the checkpoints are, instead of the run directory;"
        " all ranks reach it, and a learner on another host goes on from there. The trained model is copied to it",
    )
