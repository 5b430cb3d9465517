"""Manifests against the published schemas of Kubernetes, JobSet and KEDA, and against what the roles really take."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.runfile import RUN_DIGEST, load
from streamrl.runtime.placement.kubernetes import HEALTH_PORT, RENDEZVOUS_PORT, WEIGHTS_PORT, namespace, render
from streamrl.runtime.roles import KINDS
from streamrl.servers.launch import PLUGIN
from tests.cli.run_kit import cli

VERSION = "1.33"
SCHEMAS = Path(__file__).parents[1] / "data" / "kubernetes"
BASE = {"name": "demo", "learner": {"ranks": 4, "groups_per_step": 8}, "rollout": {"replicas": 3}}
NODES: dict[str, Any] = {
    "seed": 7,
    "model": {"path": "/work/model"},
    "engine": {"tensor_parallel": 8, "servers": 2, "flags": {"max-num-seqs": 8}, "variables": {"NCCL_DEBUG": "INFO"}},
    "cluster": {"resources": {"engine": {"cpus": 4, "gpus": 8}}},
}
RUNS: dict[str, dict[str, Any]] = {
    "own redis": {},
    "vllm": {"engine": {"kind": "vllm"}, "cluster": {"resources": {"engine": {"gpus": 2, "cpus": 4}}}},
    "redis elsewhere": {"redis": {"url": "rediss://queue.example:6380/1"}},
    "programs": {"rewards": [{"use": "code"}]},
    "recording": {"recording": {"mode": "write"}},
    "reward models": {
        "reward_models": {"My_judge": {"model": "/work/rm", "servers": 2, "flags": {"max-model-len": 512}}},
        "rewards": [{"use": "reward_model", "args": {"model": "My_judge"}}],
    },
    "vllm over nodes": {"engine_nodes": 2, **NODES, "engine": {**NODES["engine"], "kind": "vllm"}},
    "sglang over nodes": {"engine_nodes": 2, **NODES, "engine": {**NODES["engine"], "kind": "sglang"}},
}


def rendered(engine_nodes: int = 1, **more: Any) -> dict[str, str]:
    config = RunConfig.model_validate({**BASE, **more})
    return render(config, Path("/work/run.yaml"), engine_nodes=engine_nodes)


def documents(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, text in files.items():
        if name.endswith("kustomization.yaml"):
            continue
        for document in yaml.safe_load_all(text):
            found[f"{document['kind']}/{document['metadata']['name']}"] = document
    return found


def strict(schema: Any) -> Any:
    """As `kubectl apply --validate=strict`: a field that nobody knows is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if "properties" in closed and "metadata" not in closed["properties"]:
        closed.setdefault("additionalProperties", False)
    return closed


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    spec = document.get("spec", {})
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if document["kind"] == "LeaderWorkerSet":
        spec = {"template": spec["leaderWorkerTemplate"]["leaderTemplate"]}
    found: dict[str, Any] | None = spec.get("template", {}).get("spec")
    return found


def test_every_manifest_fits_its_schema():
    known = {path.stem: strict(json.loads(path.read_text())) for path in SCHEMAS.glob("*.json")}
    different = {json.dumps(one): one for more in RUNS.values() for one in documents(rendered(**more)).values()}
    assert len(different) >= 20
    for document in different.values():
        own = known.get(document["kind"].lower())
        if own is None:
            kubernetes_validate.validate(document, VERSION, strict=True)
            continue
        jsonschema.validate(document, own)
        if document["kind"] == "JobSet":
            for part in document["spec"]["replicatedJobs"]:
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **part["template"]}
                kubernetes_validate.validate(job, VERSION, strict=True)
        if document["kind"] == "LeaderWorkerSet":
            for name in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "Pod", **document["spec"]["leaderWorkerTemplate"][name]}
                kubernetes_validate.validate({**pod, "metadata": {"name": "x"}}, VERSION, strict=True)


def test_a_field_that_nobody_knows_would_be_found():
    schema = strict(json.loads((SCHEMAS / "jobset.json").read_text()))
    learner = documents(rendered())["JobSet/learner"]
    learner["spec"]["failurePolicy"]["restarts"] = 3
    with pytest.raises(jsonschema.ValidationError, match="restarts"):
        jsonschema.validate(learner, schema)


@pytest.mark.parametrize("more", RUNS.values(), ids=RUNS)
def test_the_kustomizations_name_what_is_there(more: dict[str, Any]):
    files = rendered(**more)
    seen = documents(files)
    used = set()
    for name, text in files.items():
        if not name.endswith("kustomization.yaml"):
            continue
        kustomization = yaml.safe_load(text)
        folder = Path(name).parent
        for resource in kustomization["resources"]:
            place = (Path("/") / folder / resource).resolve().relative_to("/")
            used.add(str(place))
            assert str(place) in files or f"{place}/kustomization.yaml" in files
        for patch in kustomization.get("patches", ()):
            target = seen[f"{patch['target']['kind']}/{patch['target']['name']}"]
            [operation] = yaml.safe_load(patch["patch"])
            *parents, last = operation["path"].strip("/").split("/")
            node: Any = target
            for parent in parents:
                node = node[int(parent)] if isinstance(node, list) else node[parent]
            assert (operation["op"], last) == ("add", "resources")
    assert {name for name in files if name.startswith("base/") and "kustomization" not in name} <= used
    images = {image["name"] for image in yaml.safe_load(files["base/kustomization.yaml"])["images"]}
    ours = {c["image"] for d in seen.values() if (pod := pod_of(d)) for c in pod["containers"]} - {"redis:7.2-alpine"}
    assert images == ours


@pytest.mark.parametrize("more", RUNS.values(), ids=RUNS)
def test_the_commands_are_those_of_the_roles(more: dict[str, Any]):
    url = more.get("redis", {}).get("url", "redis://redis:6379/0")
    for name, document in documents(rendered(**more)).items():
        pod = pod_of(document)
        if pod is None or document["kind"] in {"StatefulSet", "LeaderWorkerSet"}:
            continue
        words = pod["containers"][0]["args"]
        if name == "Job/prepare":
            config = prepared(documents(rendered(**more)), **more)  # the keys exist, and their values fit
            assert (config.redis.url, config.weights.transport, config.weights.port) == (url, "http", WEIGHTS_PORT)
            assert config.health.port == HEALTH_PORT
            continue
        assert words[0] == "run"
        assert words[1] in KINDS
        assert words[2:4] == ["--run", f"{url}#demo"]
        done = cli("run", *words[1:4], "--index", "x")
        assert "is no number" in done.stderr, "the options before it were understood"
        assert words[4:6] == ["--index", "auto" if words[1] in {"engine", "rollout", "reward"} else words[5]]
        assert words[6:] == (["--until-finished"] if words[1] == "learner" else [])
        assert digest_of(document) == digest_of(documents(rendered(**more))["Job/prepare"])


def digest_of(document: dict[str, Any]) -> str:
    pod = pod_of(document)
    assert pod is not None
    [found] = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == RUN_DIGEST]
    return str(found)


def test_the_digest_is_that_of_the_configuration(tmp_path: Path):
    (tmp_path / "there").mkdir()
    found = []
    for folder, more in ((tmp_path, ""), (tmp_path / "there", ""), (tmp_path, ", learner: {lr: 1.0e-4}")):
        run_file = folder / "run.yaml"
        run_file.write_text(f"{{name: demo, data: {{train: t.jsonl}}{more}}}")
        found.append(digest_of(documents(render(load(run_file, (), {}).config, run_file))["Job/prepare"]))
    assert found[0] == found[1] != found[2]


def test_the_gang_of_the_learner_starts_and_restarts_together():
    spec = documents(rendered())["JobSet/learner"]["spec"]
    [ranks] = spec["replicatedJobs"]
    job = ranks["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (4, 4, "Indexed", 0)
    env = {item["name"]: item for item in job["template"]["spec"]["containers"][0]["env"]}
    assert env["RANK"]["value"] == "$(JOB_COMPLETION_INDEX)"
    assert list(env).index("JOB_COMPLETION_INDEX") < list(env).index("RANK"), "it is expanded from what comes before"
    assert env["WORLD_SIZE"]["value"] == "4"
    # The name of pod 0 of a JobSet: SET-JOB-NUMBER_OF_THE_JOB-INDEX.SUBDOMAIN.
    assert env["STREAMRL_RENDEZVOUS"]["value"] == f"tcp://learner-{ranks['name']}-0-0.learner:{RENDEZVOUS_PORT}"
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "learner"}
    # A pod that is evicted drains and ends with 143; that costs none of the restarts.
    assert job["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "runs"}}),
        ({"checkpoint": {"store": "s3://bucket/runs"}}, {"emptyDir": {}}),
        (
            {"checkpoint": {"store": "s3://bucket/runs"}, "recording": {"mode": "write"}},
            {"persistentVolumeClaim": {"claimName": "runs"}},
        ),
    ],
)
def test_checkpoints_and_recordings_outlive_their_pod(more: dict[str, Any], kept: dict[str, Any]):
    name = "Deployment/recorder" if "recording" in more else "JobSet/learner"
    pod = pod_of(documents(rendered(**more))[name])
    assert pod is not None
    assert {"name": "runs", **kept} in pod["volumes"]
    assert {"name": "runs", "mountPath": "/scratch/runs"} in pod["containers"][0]["volumeMounts"]


def test_each_run_has_a_namespace_of_its_own():
    names = ["a-b", "a.b", "a_b", "A-b", "a-", "a" * 64, "a" * 63 + "."]
    found = [namespace(name) for name in names]
    assert found[0] == "streamrl-a-b"
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{,61}[a-z0-9]", one) for one in found)
    assert yaml.safe_load(rendered()["base/kustomization.yaml"])["namespace"] == "streamrl-demo"


def test_scaling_asks_one_pod_for_the_lag():
    trigger = documents(rendered())["ScaledObject/rollout"]["spec"]["triggers"][0]
    assert trigger["metadata"]["query"].startswith("max("), "every pod tells the lag of the whole run"


def test_pods_are_without_rights_and_secrets_in_files():
    for name, document in documents(rendered()).items():
        pod = pod_of(document)
        if pod is None:
            continue
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claimed = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claimed, name


@pytest.mark.parametrize(
    ("more", "unconfined"),
    [
        ({}, set()),
        ({"rewards": [{"use": "code"}]}, {"reward"}),
        ({"rewards": [{"use": "code", "args": {"isolation": "none", "network": "allow"}}]}, set()),
        ({"episode": {"tools": ["run_python"]}}, {"prepare", "rollout"}),
    ],
)
def test_only_pods_with_a_sandbox_may_make_user_namespaces(more: dict[str, Any], unconfined: set[str]):
    """RuntimeDefault refuses them, and the sandbox would end its role with 78."""
    found = set()
    for document in documents(rendered(**more)).values():
        if (pod := pod_of(document)) is not None and "seccompProfile" in pod["securityContext"]:
            kinds = {
                pod["securityContext"][part]["type"]
                for part in ("seccompProfile", "appArmorProfile")
                if part in pod["securityContext"]
            }
            assert len(kinds) == 1
            if kinds == {"Unconfined"}:
                found.add(document["metadata"]["name"])
            else:
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert found == unconfined


def test_only_who_must_reaches_a_port():
    seen = documents(rendered())
    [redis] = seen["NetworkPolicy/redis"]["spec"]["ingress"]
    assert [port["port"] for port in redis["ports"]] == [6379]
    ranks, weights = seen["NetworkPolicy/learner"]["spec"]["ingress"]
    assert ranks["from"] == [{"podSelector": seen["NetworkPolicy/learner"]["spec"]["podSelector"]}]
    assert weights["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "rollout"
    assert "NetworkPolicy/redis" not in documents(rendered(redis={"url": "redis://q:6379"}))
    assert "NetworkPolicy/rollout" not in seen, "nobody calls a worker"
    served = documents(rendered(engine={"kind": "vllm"}))
    [callers] = served["NetworkPolicy/engine"]["spec"]["ingress"]
    assert callers["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "rollout"
    weights_of = served["NetworkPolicy/learner"]["spec"]["ingress"][1]["from"][0]["podSelector"]
    assert weights_of["matchLabels"]["app.kubernetes.io/component"] == "engine"
    recorder = documents(rendered(recording={"mode": "write"}))["NetworkPolicy/recorder"]["spec"]
    assert recorder["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "recorder"
    assert recorder["ingress"][1] == weights


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_over_nodes(kind: str):
    seen = documents(rendered(**RUNS[f"{kind} over nodes"]))
    spec = seen["LeaderWorkerSet/server"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (2, 2, "RecreateGroupOnPodRestart")
    leader, worker = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert leader.pop("readinessProbe")["httpGet"]["port"] == 8000
    assert leader == worker, "which is which is decided by LWS_WORKER_INDEX"
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert leader["image"] == f"streamrl-{kind}"
    words = leader["args"]
    flags = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
    assert (flags["--host"], flags["--port"], flags["--nnodes"]) == ("0.0.0.0", "8000", "$(LWS_GROUP_SIZE)")
    assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)"
    assert "8" in {flags.get("--max-num-seqs"), flags.get("--tp-size")}, "flags of the run file win"
    env = {one["name"]: one.get("value") for one in leader["env"]}
    assert (env["NCCL_DEBUG"], env["STREAMRL_WEIGHTS_TOKEN_FILE"]) == ("INFO", "/secrets/weights-token")
    assert (flags.get("--seed") or flags["--random-seed"]) == "7$(GROUP_INDEX)"
    config = prepared(seen, **RUNS[f"{kind} over nodes"])
    assert config.engine.url == tuple(f"http://server-{index}.server:8000" for index in range(2))
    assert not config.engine.flags
    [engine] = seen["Deployment/engine"]["spec"]["template"]["spec"]["containers"]
    assert (engine["image"], engine["resources"]) == ("streamrl-train", {"requests": {"cpu": "4"}})
    assert "ScaledObject/engine" not in seen, "each engine has its server"


def prepared(seen: dict[str, dict[str, Any]], **more: Any) -> RunConfig:
    """The run as the Job `prepare` reads it: the settings after those of the run file."""
    words = seen["Job/prepare"]["spec"]["template"]["spec"]["containers"][0]["args"]
    settings = [word for before, word in itertools.pairwise(words) if before == "--set"]
    more = {key: value for key, value in {**BASE, **more}.items() if key != "engine_nodes"}
    return load(None, [*(f"{key}={json.dumps(value)}" for key, value in more.items()), *settings], {}).config


def test_the_servers_of_a_reward_model_have_addresses():
    seen = documents(rendered(**RUNS["reward models"]))
    servers = seen["StatefulSet/reward-model-my-judge"]["spec"]
    assert (servers["replicas"], servers["podManagementPolicy"]) == (2, "Parallel")
    [container] = servers["template"]["spec"]["containers"]
    assert container["args"][:3] == ["vllm.entrypoints.cli.main", "serve", "rm"]
    assert container["workingDir"] == "/work"
    assert container["command"][2] == 'exec "$STREAMRL_ENGINES/vllm/bin/python" -m "$@"'
    assert ["--max-model-len", "512"] in map(list, itertools.pairwise(container["args"]))
    config = prepared(seen, **RUNS["reward models"])
    judge = config.reward_models["My_judge"]
    place = "reward-model-my-judge"
    assert judge.url == tuple(f"http://{place}-{index}.{place}:8000" for index in range(2))
    assert (judge.model, judge.flags) == ("rm", {})
    assert seen[f"Service/{place}"]["spec"]["selector"] == servers["selector"]["matchLabels"]
    assert not any("reward_model" in name for name in seen)


def test_what_the_checks_compare_with_the_devices_has_them():
    gpu = {"limits": {"nvidia.com/gpu": "2"}, "requests": {"cpu": "4", "nvidia.com/gpu": "2"}}
    for name in ("Job/prepare", "Deployment/engine"):
        pod = pod_of(documents(rendered(**RUNS["vllm"]))[name])
        assert pod is not None
        assert pod["containers"][0]["resources"] == gpu
    targets = {name: yaml.safe_load(rendered(engine=engine)["overlays/gpu/kustomization.yaml"]) for name, engine in {
        "vllm": {"kind": "vllm"}, "hf": {}, "url": {"kind": "vllm", "url": ["http://a", "http://b", "http://c"]},
    }.items()}  # fmt: skip
    assert {name: [patch["target"]["name"] for patch in one["patches"]] for name, one in targets.items()} == {
        "vllm": ["learner", "engine", "prepare"], "hf": ["learner", "rollout"], "url": ["learner"],
    }  # fmt: skip


@pytest.mark.parametrize(("index", "more"), [("0", []), ("1", ["--headless"])])
def test_the_shell_of_a_server_finds_the_plug_in(index: str, more: list[str], tmp_path: Path):
    group = documents(rendered(**RUNS["vllm over nodes"]))["LeaderWorkerSet/server"]["spec"]["leaderWorkerTemplate"]
    command = group["workerTemplate"]["spec"]["containers"][0]["command"]
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "STREAMRL_ENGINES": str(tmp_path)}
    words = ["module", "serve", "a model"]
    done = subprocess.run(
        [*command, *words], env={**env, "LWS_WORKER_INDEX": index}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(PLUGIN), "-m", *words, *more]


@pytest.mark.parametrize("name", ["StatefulSet/redis", "LeaderWorkerSet/server"])
def test_the_shells_are_sound(name: str, tmp_path: Path):
    pod = pod_of(documents(rendered(**RUNS["vllm over nodes"]))[name])
    assert pod is not None
    script = tmp_path / "start.sh"
    script.write_text("#!/bin/sh\nset -eu\n" + pod["containers"][0]["command"][2])
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def judges(*names: str) -> dict[str, Any]:
    return {"reward_models": {name: {"model": "m"} for name in names}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rollout": {"placement": "colocated"}, "engine": {"kind": "vllm"}}, "shares the devices of one host"),
        ({"redis": {"url": "redis://:secret@q:6379"}}, r"redis://:\*\*\*@q:6379 has a password"),
        (judges("a" * 60), "is no name of Kubernetes"),
        (judges("a_b", "A-b"), "another has the same name"),
        ({"engine_nodes": 2}, "hf generates in the replica"),
        ({"engine_nodes": 2, "engine": {"kind": "vllm", "url": ["http://x:1"]}, "rollout": {}}, "servers of others"),
        ({"engine_nodes": 3, "engine": {"kind": "vllm", "tensor_parallel": 4}}, "not the same number of GPUs"),
        (
            {"engine_nodes": 2, "engine": {"kind": "vllm", "tensor_parallel": 4, "device": "cpu"}},
            "engine.device cpu has servers of one node",
        ),
        ({"engine_nodes": 2, "engine": {"kind": "vllm", "tensor_parallel": 2, "flags": {"host": "x"}}}, "flags.host"),
    ],
)  # fmt: skip
def test_what_cannot_run_there_is_refused(more: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        rendered(**more)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nomad", "run.yaml"], 2, "No such command 'nomad'"),
        (["kubernetes", "run.yaml", "--engine-nodes", "0"], 2, "--engine-nodes"),
        (["kubernetes", "run.yaml", "--engine-nodes", "2"], 78, "hf generates in the replica"),
        (["compose", "nowhere.yaml"], 78, "nowhere.yaml does not exist"),
        (["compose", "run.yaml", "--into", "run.yaml"], 2, "run.yaml is a file"),
        (["compose", "run.yaml", "--set", "engine.tensor_parallel=0"], 78, "engine.tensor_parallel"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words: list[str], code: int, said: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: demo")
    done = cli("render", *words, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing is written"


def test_the_command_writes_and_refuses(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"name": "demo"}))
    done = cli("render", "kubernetes", str(tmp_path / "run.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "kubernetes" / "demo"
    assert {str(folder.relative_to(tmp_path) / name) for name in rendered()} == set(done.stdout.split())
    assert cli("render", "kubernetes", str(tmp_path / "run.yaml"), cwd=tmp_path).returncode == 0
    (folder / "secrets").mkdir()
    (folder / "secrets" / "redis-password").write_text("secret")
    assert cli("render", "kubernetes", str(tmp_path / "run.yaml"), cwd=tmp_path).returncode == 0
    (folder / "other").touch()
    refused = cli("render", "kubernetes", str(tmp_path / "run.yaml"), cwd=tmp_path)
    assert refused.returncode == 73
    assert "holds other files" in refused.stderr
