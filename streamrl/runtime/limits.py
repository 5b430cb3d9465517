"""Disk, memory and open files: what a run needs, and what this machine has.

Memory and files have two counts. A run is refused for what it certainly needs. What its run file allows at most, like
samples scored at the same time, may never be used, so it is a warning. Activations, keys and values, and what rewards
do are not counted.
"""

from __future__ import annotations

import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError
from streamrl.runtime.model_checks import weight_files
from streamrl.runtime.plan import processes
from streamrl.servers.environments import computes_on_cpu

_PYTHON_FILES: Final = 64
"""Of a role: packages while they are imported, pipes, logs, sockets to Redis."""
_REDIS_FILES: Final = 48
"""Of Redis itself: 32 that it keeps back, and its own."""
_CONNECTIONS: Final = 8
"""To Redis from one process: commands, and each read that blocks."""
_LOOKERS: Final = 4
"""Commands like `status` and `lag` at the same time."""
_CHILD_FILES: Final = 6
"""Of the supervisor, for one process: two pipes and the log, and both ends of pipes while it starts."""
_RANK_FILES: Final = 8
"""Of a rank of the learner, for each other rank."""
_VERSIONS: Final = 3
"""Versions of the weights whose files are open at the same time."""
_OPENS_NOTHING: Final = frozenset(
    {"exact_match", "number_match", "math", "regex", "json_schema", "format", "length", "repetition"}
)
"""Rewards that open nothing for a sample; some share a few processes."""
_PROCESS_BYTES: Final = 40 << 20
_TORCH_BYTES: Final = 128 << 20
"""Of a process that imports torch."""
_WITH_TORCH: Final = frozenset({"learner", "engine", "rollout"})
_OWN_COPIES: Final = 3
"""Versions in /dev/shm of a learner that puts whole versions there: two are kept while one is written."""
_SHM: Final = Path("/dev/shm")  # noqa: S108 (memory of this host, not a temporary file)
_MARGIN: Final = 64 << 20
_BYTES: Final = {"float32": 4, "bfloat16": 2}
_NO_LIMIT: Final = 1 << 60
_HINT_FILES: Final = (
    "raise the hard limit: `ulimit -n 65536` as root, LimitNOFILE= of the service, docker --ulimit nofile=65536"
)
_HINT_MEMORY: Final = (
    "raise the limit of the container, or take a smaller model, fewer replicas or servers, or learner.lora"
)


class Need(NamedTuple):
    least: int
    most: int


def check_files(config: RunConfig, model_bytes: int) -> str:
    """Report the limit of open files, with a warning if the run file allows some process to need more.

    Roles raise their soft limit to the hard one. CannotCreate if some process certainly needs more than that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = open_files(config, model_bytes)
    kind = max(needs, key=lambda kind: needs[kind].least)
    least = needs[kind].least
    if hard == resource.RLIM_INFINITY:
        return f"any number for a process, {least} needed ({kind})"
    if hard < least:
        raise CannotCreate(
            f"a process may open {hard} files here (ulimit -n), {kind} of this run needs {least}", _HINT_FILES
        )
    greedy = max(needs, key=lambda kind: needs[kind].most)
    most = needs[greedy].most
    warning = f"; WARNING: {greedy} may come to need {most}: {_HINT_FILES}" if hard < most else ""
    return f"{hard} for a process, {least} needed ({kind}){warning}"


def open_files(config: RunConfig, model_bytes: int) -> dict[str, Need]:
    counts = processes(config)
    total = sum(counts.values())
    ranks = config.learner.ranks
    files = _VERSIONS * max(1, math.ceil(model_bytes / config.weights.shard_bytes))
    needs = {"supervisor": _PYTHON_FILES + _CHILD_FILES * (total + 1)}
    if config.redis.url is None:
        needs["redis"] = _REDIS_FILES + _CONNECTIONS * (total + _LOOKERS)
    if "learner" in counts:
        needs["learner"] = _PYTHON_FILES + files + _RANK_FILES * (ranks - 1)
    allowed = {"rollout": 0, "reward": 0}
    if "rollout" in counts:
        needs["rollout"] = _PYTHON_FILES + (0 if config.engines else files)
        allowed["rollout"] = config.slots if config.engines else 0
    if "engine" in counts:
        needs["engine"] = _PYTHON_FILES + files
    if "reward" in counts:
        needs["reward"] = _PYTHON_FILES
        opening = any(reward.use not in _OPENS_NOTHING for reward in config.rewards)
        allowed["reward"] = config.reward_worker.concurrency if opening else 0
    return {kind: Need(least, least + allowed.get(kind, 0)) for kind, least in needs.items()}


def check_memory(config: RunConfig, model_float32: int, root: Path = Path("/")) -> str:
    """Report the free memory, with a warning if the run may need more; CannotCreate if it certainly will."""
    free = free_memory(root)
    least, most = memory(config, model_float32)
    if free is None:
        return f"not known on this system, {least >> 20} MiB needed"
    if free < least:
        raise CannotCreate(f"{free >> 20} MiB of memory are free, this run needs {least >> 20} MiB", _HINT_MEMORY)
    warning = f"; WARNING: it may come to need {most >> 20} MiB: {_HINT_MEMORY}" if free < most else ""
    return f"{free >> 20} MiB free, {least >> 20} MiB needed{warning}"


def memory(config: RunConfig, model_float32: int) -> Need:
    """Bytes of host memory that a run takes: processes, weights on the CPU, versions in /dev/shm.

    The counts differ in the versions: one that a replica still pulls, or has staged, is not always there.
    """
    counts = processes(config)
    sizes = {"float32": model_float32, "bfloat16": model_float32 // 2}
    least = sum(count * (_TORCH_BYTES if kind in _WITH_TORCH else _PROCESS_BYTES) for kind, count in counts.items())
    copies = 0
    if "learner" in counts:
        copies = shared_memory_copies(config)
        if computes_on_cpu(config.learner.device):
            # Weights and two moments of AdamW, all in float32; with an adapter the weights alone.
            least += sizes[config.model.dtype] if config.learner.lora.rank else 3 * model_float32
            least += sizes[config.model.dtype] * (config.learner.reference.kind == "frozen")
        else:
            # Rows that are read before they go to the devices; then copies for checkpoints, and what stays on the host.
            offload = config.learner.offload
            stays = 4 if "parameters" in offload else 2 if "optimizer" in offload else 0
            least += model_float32 * (1 if config.learner.lora.rank else 3 + stays)
    engine = config.engine
    generating = "engine" if config.engines else "rollout"
    if generating in counts and not engine.url and computes_on_cpu(engine.device):
        least += counts[generating] * sizes[engine.dtype]
    # With deltas one version is stored whole, the others only as changes.
    certain = min(copies, 1 if config.weights.delta.enabled else _OWN_COPIES)
    if config.weights.transport == "directory":
        certain = 0
    version = sizes[config.weights.dtype]
    return Need(least + certain * version, least + copies * version)


def free_memory(root: Path = Path("/")) -> int | None:
    """Free bytes, swap included, within the limits of the control groups; None: not known."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        known = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        machine = known["MemAvailable"] + known.get("SwapFree", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return min([machine, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of cgroup v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            places = mount / "memory"
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (places / inner, *(places / parent for parent in inner.parents)):
            left = _left(folder, *names)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = int(stat.get(reclaimable, 0))
    except (OSError, ValueError):  # not there, or `max`
        return None
    return max(0, most - taken + cache) if most < _NO_LIMIT else None


def check_disk(config: RunConfig, run_dir: Path) -> str:
    # Weights and two moments of AdamW in float32, for the checkpoints that are kept and the one being written.
    checkpoint, steps = config.checkpoint, config.learner.steps
    milestones = steps // checkpoint.keep_every if steps and checkpoint.keep_every else 0
    need = _MARGIN
    if config.recording.mode != "write":
        need += 3 * model_bytes(config, "float32") * (checkpoint.keep + milestones + 1)
    if config.weights.transport == "directory":
        need += (5 if config.weights.quantize else 3) * model_bytes(config, config.weights.dtype)
    folder = next(path for path in (run_dir.resolve(), *run_dir.resolve().parents) if path.exists())
    return _space(folder, need, "use another disk, or lower checkpoint.keep")


def check_shared_memory(config: RunConfig) -> str:
    copies = shared_memory_copies(config)
    if not copies:
        return "not used"
    hint = "give the host (or container: --shm-size) a larger /dev/shm"
    if not config.weights.delta.enabled:
        hint = f"{hint}, or set weights.transport: directory"
    if not _SHM.is_dir():
        raise ConfigError(f"{_SHM} does not exist on this system", hint)
    return _space(_SHM, copies * model_bytes(config, config.weights.dtype), hint)


def _space(folder: Path, need: int, hint: str) -> str:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CannotCreate(f"{folder} has {free >> 20} MiB free, this run needs {need >> 20} MiB", hint)
    return f"{free >> 20} MiB free in {folder}, {need >> 20} MiB needed"


def model_bytes(config: RunConfig, dtype: str) -> int:
    """Size of the weights in `dtype`, from the files of the model (bfloat16 unless its config says float32)."""
    path = Path(config.model.path)
    files = weight_files(path) if path.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    try:
        described = orjson.loads((path / "config.json").read_bytes()) if files else {}
    except (OSError, orjson.JSONDecodeError):
        described = {}
    stored = str(described.get("dtype") or described.get("torch_dtype") or "bfloat16")
    return size * _BYTES[dtype] // _BYTES.get(stored, 2)


def shared_memory_copies(config: RunConfig) -> int:
    """Most copies of the weights in /dev/shm at the same time, with all replicas on this host.

    Three where the learner puts its versions (two are kept, or an anchor and its deltas; one is written), half as much
    again of quantised ones, and two in the staging folder of each replica that fetches versions or completes deltas.
    """
    weights = config.weights
    followers = config.engines or config.rollout.replicas
    staging_folders = followers if weights.pulled or weights.delta.enabled else 0
    return (0 if weights.transport == "directory" else 5 if weights.quantize else 3) + 2 * staging_folders
