"""What `deploy/` starts exists: every command of the compose file is one the command line understands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from streamrl.config import RunConfig
from streamrl.runtime.roles import KINDS

ROOT = Path(__file__).parent.parent
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]


def test_every_role_but_the_server_is_a_service_with_its_own_index():
    started = [
        (service["command"][1], service["command"][5:]) for service in SERVICES.values() if "run" in service["command"]
    ]
    assert {kind for kind, _ in started} == set(KINDS) - {"redis"}
    assert len({(kind, *rest) for kind, rest in started}) == len(started)


def test_the_run_is_prepared_with_keys_that_exist():
    words = SERVICES["prepare"]["command"]
    assert words[0] == "up"
    for key in (word.partition("=")[0] for word in words if "=" in word):
        section, name = key.split(".")
        assert name in RunConfig.model_fields[section].annotation.model_fields


def test_redis_never_evicts_and_its_password_is_in_no_argument():
    line = SERVICES["redis"]["command"][2]
    assert "noeviction" in line
    assert re.search(r"--requirepass \"\$\$\(cat", line)


def test_the_image_copies_files_that_exist():
    for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
