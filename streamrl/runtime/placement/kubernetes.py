"""A run as Kubernetes manifests: a kustomize base made from the plan, and overlays to start from.

```
prepare (Job): checks the run file, publishes the run in Redis
   v
feeder, engine, rollout, reward (Deployments), learner (JobSet, one gang)     each `streamrl run ROLE --run redis://redis#NAME`
                                                                      waits for STREAMRL_RUN_DIGEST to be published

engine (LeaderWorkerSet, with `engine_nodes`), reward-model-NAME (StatefulSet)     vLLM or SGLang, asked by URL
```
Kubernetes restarts what ends; streamrl's own supervisor is not there. SIGTERM is the drain, so that a pod needs no
`preStop`: `terminationGracePeriodSeconds` is the deadline of the drain.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl import __version__
from streamrl.config import EngineConfig, Resources, RewardModelConfig, RunConfig
from streamrl.config.episode import RUN_PYTHON
from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.errors import ConfigError
from streamrl.http import Call
from streamrl.runfile import RUN_DIGEST
from streamrl.runtime.placement.rendered import (
    as_yaml,
    below,
    drain_seconds,
    expect_portable,
    lead,
    redis_script,
    server_image,
    shared_settings,
)
from streamrl.runtime.plan import processes, threads
from streamrl.servers.launch import words
from streamrl.servers.reward_models import ModelServer
from streamrl.servers.sglang import SglangDialect
from streamrl.servers.vllm import VllmDialect

HEALTH_PORT: Final = 8090
WEIGHTS_PORT: Final = 8470
RENDEZVOUS_PORT: Final = 29400
SERVER_PORT: Final = 8000
SERVER: Final = "server"
_LABEL: Final = "app.kubernetes.io/name"
_PART: Final = "app.kubernetes.io/component"
_USER: Final = 1000
_REDIS: Final = "redis:7.2-alpine"

Manifest = dict[str, Any]

_WEIGHTS_TOKEN: Final = {"name": "STREAMRL_WEIGHTS_TOKEN_FILE", "value": "/secrets/weights-token"}
_PLUGIN: Final = """PYTHONPATH=$(python -P -c 'from streamrl.servers.launch import PLUGIN; print(PLUGIN)')
export PYTHONPATH"""
"""Where the image has it."""
_FOLLOW: Final = '[ "$LWS_WORKER_INDEX" = 0 ] || set -- "$@" --headless'
"""Of the nodes of a vLLM server the first answers; SGLang knows it by itself."""


def render(
    config: RunConfig, run_file: Path, overrides: Sequence[str] = (), *, engine_nodes: int = 1
) -> dict[str, str]:
    """Files by their path below the folder of the manifests; the volume `work` is the folder of `run_file`.

    `overrides` are those of `--set`, with which `config` was read. `engine_nodes`: how many each engine server takes.

    ConfigError: the run needs what pods of different nodes do not share.
    """
    expect_portable(config, "Kubernetes")
    folder = run_file.resolve().parent
    manifests: dict[str, list[Manifest]] = {}
    settings: dict[str, Any] = {}
    if engine_nodes > 1:
        manifests[SERVER], settings = _engine(config, engine_nodes, folder)
    for name in config.reward_servers:
        if _service_of(name) in manifests:
            raise ConfigError(f"reward_models.{name}: another has the same name in small letters", "rename one")
        manifests[_service_of(name)], more = _reward_model(config, name, folder)
        settings |= more
    config = _beside(config, settings)
    digest = _digest(config, folder)
    overrides = [*overrides, *(f"{key}={orjson.dumps(value).decode()}" for key, value in settings.items())]
    prepare = _prepare(config, run_file.name, overrides, digest, with_engine=SERVER in manifests)
    manifests |= {"prepare": [prepare], "network": _network(config)}
    if config.redis.url is None:
        manifests["redis"] = _redis(config)
    for kind, count in processes(config).items():
        if kind == "learner":
            manifests[kind] = [_learner(config, count, digest)]
        else:
            manifests[kind] = [_deployment(config, kind, count, digest), *_disruptions(kind, count)]
    files = {f"base/{name}.yaml": "---\n".join(map(as_yaml, parts)) for name, parts in manifests.items()}
    images = {container["image"] for parts in manifests.values() for part in parts for container in _containers(part)}
    files["base/kustomization.yaml"] = as_yaml(_base(config, list(manifests), images))
    files["overlays/gpu/kustomization.yaml"] = as_yaml(_gpu(config))
    files["overlays/autoscale/kustomization.yaml"] = as_yaml(
        {**_kustomization("Kustomization"), "resources": ["../../base", "scaling.yaml"]}
    )
    files["overlays/autoscale/scaling.yaml"] = "---\n".join(map(as_yaml, _scaling(config)))
    return files


def redis_url(config: RunConfig) -> str:
    return config.redis.url or "redis://redis:6379/0"


def namespace(run: str) -> str:
    """A namespace for each run: `work`, `runs`, `redis` and the roles have the same names in all of them."""
    label = re.sub(r"[^a-z0-9-]", "-", run.lower())[:40].rstrip("-")
    return f"streamrl-{label}" if label == run else f"streamrl-{label}-{zlib.crc32(run.encode()):08x}"


def _digest(config: RunConfig, folder: Path) -> Manifest:
    """The variable that names this configuration: roles join no older one. It does not depend on where `folder` is."""
    values = config.model_dump_json(exclude_defaults=True).replace(str(folder), "/work")
    return {"name": RUN_DIGEST, "value": hashlib.sha256(f"{__version__} {values}".encode()).hexdigest()[:16]}


def _image(config: RunConfig, kind: str) -> str:
    """Rewards need no torch; a replica has its engine in its image, which the checks before the start want to see."""
    if kind == "reward":
        return "streamrl-core"
    return server_image(config) if kind in {"prepare", "engine"} else "streamrl-train"


def _kustomization(kind: str) -> Manifest:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": kind}


def _base(config: RunConfig, names: list[str], images: set[str]) -> Manifest:
    secrets = ["redis-password", "metrics-token", *(["weights-token"] if SERVER in names else [])]
    return {
        **_kustomization("Kustomization"),
        "namespace": namespace(config.name),
        "labels": [{"pairs": {"app.kubernetes.io/part-of": "streamrl"}}],
        # One entry for each target of deploy/Dockerfile that the run uses.
        "images": [
            {"name": image, "newName": f"registry.example.com/{image}", "newTag": "latest"}
            for image in sorted(images - {_REDIS})
        ],
        "resources": [f"{name}.yaml" for name in names],
        # `openssl rand -hex 24 > secrets/redis-password`, and the same for each other; none belongs into git.
        "secretGenerator": [{"name": "streamrl", "files": [f"secrets/{name}" for name in secrets]}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }


def _meta(name: str, **labels: str) -> Manifest:
    return {"name": name, "labels": {_LABEL: "streamrl", _PART: name, **labels}}


def _selector(name: str) -> Manifest:
    return {"matchLabels": {_LABEL: "streamrl", _PART: name}}


def _container(
    config: RunConfig, kind: str, arguments: list[str], *, wanted: Resources | None = None, probes: bool = True
) -> Manifest:
    wanted = config.resources(kind) if wanted is None else wanted
    env = {
        **threads(config, kind, cluster=True),
        "STREAMRL_REDIS__PASSWORD_FILE": "/secrets/redis-password",
        "HOME": "/scratch",
    }
    resources = {"cpu": f"{wanted.cpus:g}"} if wanted.cpus else {}
    limits = {"nvidia.com/gpu": f"{wanted.gpus:g}"} if wanted.gpus else {}
    mounts = {"/work": ("work", True), "/secrets": ("secrets", True)}
    mounts |= {"/scratch": ("scratch", False), "/dev/shm": ("shm", False), "/tmp": ("tmp", False)}  # noqa: S108
    if kind == lead(config):
        mounts["/scratch/runs"] = ("runs", False)
    container: Manifest = {
        "name": kind,
        "image": _image(config, kind),
        "args": arguments,
        "workingDir": "/scratch",
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
            for path, (name, read_only) in mounts.items()
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if resources or limits:
        container["resources"] = {"requests": {**resources, **limits}, **({"limits": limits} if limits else {})}
    if probes:
        container |= _probes(config)
    return container


def _probes(config: RunConfig) -> Manifest:
    def get(path: str) -> Manifest:
        return {"httpGet": {"path": path, "port": HEALTH_PORT}}

    slowest = max(config.supervisor.start_deadline, config.engine.start_deadline + config.weights.deadline)
    return {
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        "startupProbe": {**get("/livez"), "periodSeconds": 5, "failureThreshold": round(slowest / 5)},
        "livenessProbe": {
            **get("/livez"),
            "periodSeconds": 10,
            "failureThreshold": round(config.supervisor.liveness_deadline / 10),
        },
        "readinessProbe": {**get("/readyz"), "periodSeconds": 5},
    }


def _pod(config: RunConfig, kind: str, container: Manifest, *, restart: str = "Always") -> Manifest:
    volumes: list[Manifest] = [
        # Run file, data, model and reward code; anything that all nodes can mount.
        {"name": "work", "persistentVolumeClaim": {"claimName": "work", "readOnly": True}},
        {"name": "secrets", "secret": {"secretName": "streamrl", "defaultMode": 0o440}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if kind == lead(config):
        stored = kind == "learner" and config.checkpoint.store is not None  # a recording is not copied to the store
        kept = {"emptyDir": {}} if stored else {"persistentVolumeClaim": {"claimName": "runs"}}
        volumes.append({"name": "runs", **kept})
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": drain_seconds(config),
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            # The sandbox of programs is made of user namespaces and mounts, which the default profiles refuse.
            **(_UNCONFINED if _runs_programs(config, kind) else {"seccompProfile": {"type": "RuntimeDefault"}}),
        },
        "containers": [container],
        "volumes": volumes,
    }


_UNCONFINED: Final[Manifest] = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}


def _runs_programs(config: RunConfig, kind: str) -> bool:
    """Whether a pod runs programs of the model in a sandbox: those of rewards, or of a tool (`prepare` tries that)."""
    if kind == "reward":
        return any(reward.use == "code" and reward.args.get("isolation") != "none" for reward in config.rewards)
    tools = kind in {"prepare", "rollout"} and RUN_PYTHON in config.episode.tools
    return tools and config.episode.run_python.get("isolation") != "none"


def _role(config: RunConfig, kind: str, index: str) -> list[str]:
    return ["run", kind, "--run", f"{redis_url(config)}#{config.name}", "--index", index]


def _deployment(config: RunConfig, kind: str, count: int, digest: Manifest) -> Manifest:
    index = "0" if kind in {"feeder", "player", "recorder"} else "auto"
    container = _container(config, kind, _role(config, kind, index))
    container["env"].append(digest)
    pod = _pod(config, kind, container)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(kind),
        "spec": {
            "replicas": count,
            "selector": _selector(kind),
            # Two feeders would take turns: the newer one fences the older one.
            "strategy": {"type": "Recreate"} if index == "0" else {"rollingUpdate": {"maxUnavailable": 1}},
            "template": {"metadata": _meta(kind), "spec": pod},
        },
    }


def _disruptions(kind: str, count: int) -> list[Manifest]:
    if count < 2:
        return []
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _meta(kind),
            "spec": {"maxUnavailable": 1, "selector": _selector(kind)},
        }
    ]


def _learner(config: RunConfig, ranks: int, digest: Manifest) -> Manifest:
    """All ranks in one JobSet: when one ends before the run has, all start again from the checkpoint."""
    words = [*_role(config, "learner", "$(JOB_COMPLETION_INDEX)"), "--until-finished"]
    container = _container(config, "learner", words)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"] = [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        *container["env"],
        digest,
        {"name": "RANK", "value": "$(JOB_COMPLETION_INDEX)"},
        {"name": "LOCAL_RANK", "value": "0"},
        {"name": "WORLD_SIZE", "value": str(ranks)},
        {"name": "STREAMRL_RENDEZVOUS", "value": f"tcp://learner-ranks-0-0.learner:{RENDEZVOUS_PORT}"},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": ranks,
        "parallelism": ranks,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {
            "metadata": _meta("learner"),
            "spec": _pod(config, "learner", container, restart="Never"),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _meta("learner"),
        "spec": {
            "failurePolicy": {
                "maxRestarts": config.supervisor.max_restarts,
                "rules": [
                    {
                        "name": "evicted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "successPolicy": {"operator": "All"},
            "network": {"enableDNSHostnames": True, "subdomain": "learner"},
            "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _prepare(
    config: RunConfig, run_file: str, overrides: Sequence[str], digest: Manifest, *, with_engine: bool
) -> Manifest:
    """`with_engine`: it waits for the servers of the run, which start beside it and need the token of the weights."""
    settings = {
        **shared_settings(config),
        "redis.url": redis_url(config),
        "redis.password_file": "/secrets/redis-password",
        "health.host": "0.0.0.0",  # noqa: S104 (a pod's own address; the NetworkPolicy says who reaches it)
        "health.port": str(HEALTH_PORT),
        "health.token_file": "/secrets/metrics-token",
        "weights.port": str(WEIGHTS_PORT),
    }
    items = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
    words = [word for item in items for word in ("--set", item)]
    arguments = ["up", f"/work/{run_file}", "--run", f"/scratch/{config.name}", "--prepare", *words]
    # The checks compare the servers' environment with the devices that they see.
    wanted = config.resources("engine") if config.engine.managed else None
    container = _container(config, "prepare", arguments, wanted=wanted, probes=False)
    container["env"] += [digest, *([_WEIGHTS_TOKEN] if with_engine else [])]
    pod = _pod(config, "prepare", container, restart="OnFailure")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta("prepare"),
        "spec": {"backoffLimit": 12 if with_engine else 4, "template": {"metadata": _meta("prepare"), "spec": pod}},
    }


def _redis(config: RunConfig) -> list[Manifest]:
    ping = ["sh", "-c", "REDISCLI_AUTH=$(cat /secrets/redis-password) redis-cli ping | grep -q PONG"]
    container = {
        "name": "redis",
        "image": _REDIS,
        "command": ["sh", "-euc", redis_script(config, "/secrets/redis-password")],
        "ports": [{"name": "redis", "containerPort": 6379}],
        "readinessProbe": {"exec": {"command": ping}, "periodSeconds": 2},
        "resources": {"requests": {"memory": str(config.redis.maxmemory * 2)}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "secrets", "mountPath": "/secrets", "readOnly": True},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 999, "fsGroup": 999},
        "containers": [container],
        "volumes": [{"name": "secrets", "secret": {"secretName": "streamrl", "defaultMode": 0o440}}],
    }
    claim = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(config.redis.maxmemory * 4)}},
        },
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta("redis"),
            "spec": {
                "clusterIP": "None",
                "selector": _selector("redis")["matchLabels"],
                "ports": [{"name": "redis", "port": 6379}],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": _meta("redis"),
            "spec": {
                "serviceName": "redis",
                "replicas": 1,
                "selector": _selector("redis"),
                "template": {"metadata": _meta("redis"), "spec": spec},
                "volumeClaimTemplates": [claim],
            },
        },
    ]


def _policy(name: str, selector: Manifest, *rules: Manifest) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(name),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(rules)},
    }


def _allow(port: int, *who: Mapping[str, Any]) -> Manifest:
    return {"from": list(who), "ports": [{"port": port, "protocol": "TCP"}]}


def _network(config: RunConfig) -> list[Manifest]:
    """Who reaches what: roles reach Redis, replicas the learner, ranks each other; monitoring reaches the metrics."""
    roles = {"podSelector": {"matchLabels": {_LABEL: "streamrl"}}}
    leader = lead(config)
    holder = "engine" if config.engines else "rollout"
    own, follower, rollout = ({"podSelector": _selector(kind)} for kind in (leader, holder, "rollout"))
    monitoring = {"namespaceSelector": {"matchLabels": {"streamrl/monitoring": "true"}}}

    policies = [
        _policy("streamrl", {"matchLabels": {_LABEL: "streamrl"}}, _allow(HEALTH_PORT, monitoring)),
        # Ranks talk to each other on ports that gloo and NCCL choose.
        _policy(leader, _selector(leader), {"from": [own]}, _allow(WEIGHTS_PORT, follower)),
    ]
    if config.engine.managed:
        # Servers listen on any free port, and ask for the token of the run.
        policies.append(_policy("engine", _selector("engine"), {"from": [rollout]}))
    if config.redis.url is None:
        policies.append(_policy("redis", _selector("redis"), _allow(6379, roles)))
    return policies


def _gpu(config: RunConfig) -> Manifest:
    """One GPU for each learner rank and each replica that generates, unless the run file says how many."""

    def patch(kind: str, name: str, pod: str) -> Manifest:
        value = '{"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}'
        text = f"- {{op: add, path: {pod}/containers/0/resources, value: {value}}}\n"
        return {"target": {"kind": kind, "name": name}, "patch": text}

    patches = []
    if "learner" in processes(config) and not config.resources("learner").gpus:
        patches.append(patch("JobSet", "learner", "/spec/replicatedJobs/0/template/spec/template/spec"))
    generating = "engine" if config.engines else "rollout"
    if generating in processes(config) and not config.engine.url and not config.resources(generating).gpus:
        checked = [patch("Job", "prepare", "/spec/template/spec")] if config.engine.managed else []
        patches += [patch("Deployment", generating, "/spec/template/spec"), *checked]
    return {**_kustomization("Kustomization"), "resources": ["../../base"], "patches": patches}


def _scaling(config: RunConfig) -> list[Manifest]:
    """KEDA scales replicas and workers by our own lag. Its `redis-streams` trigger counts what is done already."""
    streams = {"engine" if config.engines else "rollout": "prompts", "reward": "rollouts"}
    found = []
    for kind, stream in streams.items():
        # Servers of others are shared out to the replicas of the start.
        if kind not in processes(config) or (kind == "engine" and config.engine.url):
            continue
        query = f'max(streamrl_lag{{run="{config.name}",stream="{stream}"}})'  # every pod tells the same
        found.append(
            {
                "apiVersion": "keda.sh/v1alpha1",
                "kind": "ScaledObject",
                "metadata": _meta(kind),
                "spec": {
                    "scaleTargetRef": {"name": kind},
                    "minReplicaCount": 1,
                    "maxReplicaCount": 8,
                    "cooldownPeriod": 300,
                    "triggers": [
                        {
                            "type": "prometheus",
                            "metadata": {
                                "serverAddress": "http://prometheus.monitoring:9090",
                                "query": query,
                                "threshold": "64",
                            },
                        }
                    ],
                },
            }
        )
    return found


# ---- servers: what streamrl starts elsewhere, beside its roles, has pods of its own here


def _beside(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run with servers that others start."""
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        *parents, last = key.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[last] = value
    return RunConfig.model_validate(values)


def _others(section: str, server: EngineConfig | RewardModelConfig, urls: Sequence[str]) -> dict[str, Any]:
    """Settings that name servers by URL; how they are started is not for the roles."""
    none: dict[str, Any] = {"environment": None, "flags": {}, "variables": {}, "devices": []}
    given = {f"{section}.{name}": value for name, value in none.items() if getattr(server, name)}
    return {f"{section}.url": list(urls), f"{section}.servers": 1, **given}


def _engine(config: RunConfig, nodes: int, folder: Path) -> tuple[list[Manifest], dict[str, Any]]:
    """Every engine server over `nodes` pods, which start and restart together; and the settings of a run with them."""
    engine = config.engine
    if not engine.managed:
        what = "engine.url names servers of others" if engine.url else "engine.kind hf generates in the replica"
        raise ConfigError(f"--engine-nodes {nodes}: {what}", "set engine.kind to vllm or sglang, and no engine.url")
    if engine.device == "cpu":
        raise ConfigError(f"--engine-nodes {nodes}: engine.device cpu has servers of one node", "set it to auto")
    if engine.tensor_parallel % nodes:
        raise ConfigError(
            f"--engine-nodes {nodes}: engine.tensor_parallel {engine.tensor_parallel} is not the same number of GPUs on"
            " each node",
            f"set engine.tensor_parallel to a multiple of {nodes}",
        )
    count = engine.servers
    container, ready = _engine_container(config, nodes, folder)
    leader = {**container, "readinessProbe": _answers(ready)}
    template = {"metadata": {"labels": _meta(SERVER)["labels"]}}
    lws = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _meta(SERVER),
        "spec": {
            "replicas": count,
            # The controller makes the Service of this name, in which `engine-N` is the first pod of group N.
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {**template, "spec": _pod(config, SERVER, leader)},
                "workerTemplate": {**template, "spec": _pod(config, SERVER, container)},
            },
        },
    }
    own, *askers = ({"podSelector": _selector(kind)} for kind in (SERVER, "engine", "rollout", "prepare"))
    policies = [
        _policy(SERVER, _selector(SERVER), {"from": [own]}, _allow(SERVER_PORT, *askers)),
        _policy("engine-weights", _selector(lead(config)), _allow(WEIGHTS_PORT, own)),
    ]
    urls = [f"http://{SERVER}-{index}.{SERVER}:{SERVER_PORT}" for index in range(count)]
    # The role computes nothing then.
    freed = {"cluster.resources.engine.gpus": 0} if config.resources("engine").gpus else {}
    return [lws, *policies], {**_others("engine", engine, urls), **freed}


def _engine_container(config: RunConfig, nodes: int, folder: Path) -> tuple[Manifest, Call]:
    """The container of each node of a server, and the call that tells whether the server is ready."""
    engine = config.engine
    dialect = SglangDialect(config) if engine.kind == "sglang" else VllmDialect(config)
    first = [_PLUGIN, _FOLLOW] if engine.kind == "vllm" else [_PLUGIN]
    rendezvous = {"nnodes": "$(LWS_GROUP_SIZE)", "node-rank": "$(LWS_WORKER_INDEX)"}
    if engine.kind == "sglang":
        rendezvous["dist-init-addr"] = f"$(LWS_LEADER_ADDRESS):{RENDEZVOUS_PORT}"
    else:
        rendezvous |= {"master-addr": "$(LWS_LEADER_ADDRESS)", "master-port": str(RENDEZVOUS_PORT)}
    # No two servers of a run may draw the same numbers.
    drawn = {"random-seed" if engine.kind == "sglang" else "seed": f"{config.seed % 1_000_000}$(GROUP_INDEX)"}
    model = below(folder, config.model.path)
    flags = dialect.flags(model=model, port=SERVER_PORT, seed=0, cpu=False)
    wanted = Resources(cpus=config.resources("engine").cpus, gpus=engine.tensor_parallel // nodes)
    container = _server(config, "engine", engine.kind, {**flags, **drawn, **rendezvous}, wanted, *first)
    group = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
    environ = {**dialect.environ(model, cpu=False), **engine.variables}
    container["env"] += [{"name": "GROUP_INDEX", "valueFrom": group}, _WEIGHTS_TOKEN, *_variables(environ)]
    return container, dialect.ready


def _service_of(model: str) -> str:
    name = f"reward-model-{model.lower().replace('_', '-')}"
    if re.fullmatch(r"[a-z0-9-]{,51}[a-z0-9]", name) is None:
        raise ConfigError(f"reward_models.{model}: {name} is no name of Kubernetes", "give it a shorter, plainer one")
    return name


def _reward_model(config: RunConfig, model: str, folder: Path) -> tuple[list[Manifest], dict[str, Any]]:
    """The servers of a reward model, each with an address of its own; and the settings of a run with them."""
    served, name = config.reward_models[model], _service_of(model)
    kind = ModelServer(model, served, Path(), cpu=False)
    asked = config.resources(REWARD_MODEL_ROLE)
    wanted = asked.model_copy(update={"gpus": asked.gpus or 1.0})
    path = below(folder, served.model)
    flags = kind.flags(model=path, port=SERVER_PORT, seed=0)
    container = _server(config, f"{REWARD_MODEL_ROLE}.{model}", served.kind, flags, wanted)
    container["env"] += _variables({**kind.environ(path), **served.variables})
    container["readinessProbe"] = _answers(kind.ready)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name),
        "spec": {
            "clusterIP": "None",
            "selector": _selector(name)["matchLabels"],
            "ports": [{"name": "http", "port": SERVER_PORT}],
        },
    }
    servers = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(name),
        "spec": {
            "serviceName": name,
            "replicas": served.servers,
            "podManagementPolicy": "Parallel",
            "selector": _selector(name),
            "template": {"metadata": _meta(name), "spec": _pod(config, name, container)},
        },
    }
    policy = _policy(name, _selector(name), _allow(SERVER_PORT, {"podSelector": _selector("reward")}))
    urls = [f"http://{name}-{index}.{name}:{SERVER_PORT}" for index in range(served.servers)]
    section = f"reward_models.{model}"
    return [service, servers, policy], {f"{section}.model": path, **_others(section, served, urls)}


def _server(
    config: RunConfig, kind: str, of: str, flags: Mapping[str, Any], wanted: Resources, *first: str
) -> Manifest:
    """A container of vLLM or SGLang; `kind` is the process that starts it elsewhere, `first` lines of its shell."""
    flags = {**flags, "host": "0.0.0.0"}  # noqa: S104 (a pod's own address; the NetworkPolicy says who reaches it)
    module = ["sglang.launch_server"]
    if of == "vllm":
        module = ["vllm.entrypoints.cli.main", "serve", flags.pop("model")]
    container = _container(config, kind, [*module, *words(flags)], wanted=wanted, probes=False)
    script = "\n".join([*first, f'exec "$STREAMRL_ENGINES/{of}/bin/python" -m "$@"'])
    ports = [{"name": "http", "containerPort": SERVER_PORT}]
    image = f"streamrl-{of}"
    return {
        **container, "name": "server", "image": image, "command": ["sh", "-euc", script, "server"],
        "workingDir": "/work", "ports": ports,
    }  # fmt: skip


def _variables(environ: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in environ.items() if name != "PYTHONPATH"]


def _answers(ready: Call) -> Manifest:
    return {"httpGet": {"path": ready.path, "port": SERVER_PORT}, "periodSeconds": 5}


def _containers(node: Any) -> Iterator[Manifest]:
    """All containers of a manifest."""
    if isinstance(node, Mapping):
        yield from node.get("containers", ())
    parts = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    for part in parts:
        yield from _containers(part)
