"""Where prompts come from: files, data sets of the hub, code of the user, and mixtures of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, PlainValidator, field_serializer, model_validator

from streamrl.config.base import Positive, Section

HUB: Final = re.compile(r"hf:(?P<name>[^:]+):((?P<config>[^/]+)/)?(?P<split>[^/]+)")
BLOCK: Final = 1000  # groups in which a mixture has its weights exactly
_IMPORT: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def _place(value: Any) -> Path | str:
    """A path, unless it is the name of a data set of the hub or an import path."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a file, hf:OWNER/NAME:SPLIT or module:Name")  # noqa: TRY004
    if value.startswith("hf:") and not HUB.fullmatch(value):
        raise ValueError(f"{value}: write hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG/SPLIT")
    return value if HUB.fullmatch(value) or _IMPORT.fullmatch(value) else Path(value)


def _listed(value: Any) -> Any:
    """One source may stand alone, and a source may be its name alone."""
    if value is None:
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple({"source": one} if isinstance(one, str | Path) else one for one in listed)


class SourceConfig(Section):
    """One source of prompts; alone, its name as text is enough (docs/guides/data.md)."""

    source: Annotated[Path | str, PlainValidator(_place, json_schema_input_type=str)] = Field(
        description="a file (.jsonl, .parquet), hf:OWNER/NAME:CONFIG/SPLIT, or module:Name of an iterable"
    )
    name: str = Field("", description="name in rewards and figures; empty: of its file, data set or class, in a list")
    weight: Annotated[FiniteFloat, Field(ge=0, le=1e6)] | None = Field(
        None, description="share of the groups, relative to the other sources; empty for all: one order of all prompts"
    )
    columns: dict[str, str] | None = Field(None, description="instead of data.columns")
    prompt: str | None = Field(None, description="instead of data.prompt")
    chat: bool | None = Field(None, description="instead of data.chat")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of module:Name")

    @property
    def stem(self) -> str:
        if isinstance(self.source, Path):
            return self.source.stem
        found = HUB.fullmatch(self.source)
        return found["name"].rpartition("/")[2] if found else self.source.rpartition(":")[2]


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_listed)]


class CurriculumConfig(Section):
    """Which prompts are passed over for a while (docs/guides/curriculum.md)."""

    use: str = Field("skip_solved", description="skip_solved, or module:Name of your own")
    args: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments: visits, epochs, threshold")


class DataConfig(Section):
    """Prompts: records with `prompt` (text) or `messages` (chat), `answer`; any other column is metadata."""

    train: Sources = Field(
        (SourceConfig(source=Path("train.jsonl")),), min_length=1, description="training prompts: a source, or a list"
    )
    held_out: Sources = Field((), description="held-out prompts for evaluation; never trained")
    columns: dict[str, str] = Field(
        default_factory=dict, description="column that is `prompt`, `messages`, `answer`, `images` or `source`"
    )
    prompt: str | None = Field(None, description='template of prompts over the columns of a record, "{question}\\n"')
    chat: bool = Field(False, description="a prompt that is text is a chat of one user message")
    epochs: Positive | None = Field(None, description="passes over the training prompts; empty: for ever")
    shuffle: bool = Field(True, description="a new order for each epoch, a function of seed and epoch")
    max_prompt_tokens: Positive = Field(1024, description="longest prompt in tokens")
    long_prompts: Literal["refuse", "drop"] = Field(
        "refuse", description="a longer prompt, or one that fills model.context, is an error, or left out"
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="prompts are passed over by what responses to them scored; empty: none is"
    )

    @field_serializer("train", "held_out")
    def _shortest(self, sources: tuple[SourceConfig, ...]) -> Any:
        found = [one.model_dump(mode="json", exclude_defaults=True) for one in sources]
        short = [one["source"] if one.keys() == {"source"} else one for one in found]
        return short[0] if len(short) == 1 and isinstance(short[0], str) else short or None

    def whole(self, sources: Sequence[SourceConfig]) -> list[SourceConfig]:
        """The sources with what holds for all of them; those of a list with their names."""
        shared, found = {key: getattr(self, key) for key in ("columns", "prompt", "chat")}, []
        for one in sources:
            own = {key: getattr(one, key) for key in shared if getattr(one, key) is not None}
            name = one.name or (one.stem if len(sources) > 1 else "")
            found.append(one.model_copy(update={**shared, **own, "name": name}))
        return found

    @property
    def names(self) -> set[str] | None:
        """The sources of all prompts; None: the records name them."""
        whole = [*self.whole(self.train), *self.whole(self.held_out)]
        return None if any("source" in (one.columns or ()) for one in whole) else {one.name for one in whole}

    @property
    def weights(self) -> list[float]:
        """Of the training sources; empty: they have none."""
        return [one.weight for one in self.train if one.weight is not None]

    @model_validator(mode="after")
    def _check_sources(self) -> DataConfig:
        for key, sources in (("train", self.train), ("held_out", self.held_out)):
            names = [one.name for one in self.whole(sources)]
            if len(set(names)) < len(names):
                raise ValueError(f"data.{key} has two sources of one name: {', '.join(names)}; give them `name:`")
        if any(one.weight is not None for one in self.held_out):
            raise ValueError("data.held_out takes all prompts of each source: leave out `weight`")
        if weights := self.weights:
            if len(weights) < len(self.train):
                raise ValueError("data.train has sources with a weight and without: give one to all, or to none")
            if not sum(weights):
                raise ValueError("data.train has weights that sum to 0: no prompt would be taken")
            for one, quota in zip(self.train, quotas(weights), strict=True):
                if one.weight and not quota:
                    raise ValueError(f"data.train: weight {one.weight:g} of {one.stem} is less than 1 group in {BLOCK}")
        return self


def quotas(weights: Sequence[float]) -> list[int]:
    """How many groups of a block each source has: its share, by the method of the largest remainder."""
    shares = [BLOCK * weight / sum(weights) for weight in weights]
    found = [int(share) for share in shares]
    largest = sorted(range(len(shares)), key=lambda number: found[number] - shares[number])
    for number in largest[: BLOCK - sum(found)]:
        found[number] += 1
    return found
