"""What a role serves: health is open, figures are for those who may read the token of the run."""

from __future__ import annotations

import aiohttp
import pytest

from streamrl.config import HealthConfig, RunConfig
from streamrl.errors import ConfigError
from streamrl.http import own_key
from streamrl.queues import Role, open_ledgers
from streamrl.runtime.health import serve_health


async def asked(url: str, path: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize("named", [False, True])
async def test_figures_need_a_token_that_only_the_owner_of_the_run_reads(redis_run, tmp_path, named):
    config = RunConfig.model_validate({"name": "t", "redis": redis_run.config.model_dump()})
    token = tmp_path / "named.token" if named else redis_run.run_dir / "health.token"
    if named:
        token.write_text("a-token")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        role = Role("reward.0", config, redis_run.run_dir, ledgers)
        async with serve_health(role, HealthConfig(token_file=token if named else None)) as url:
            assert named or token.stat().st_mode & 0o777 == 0o600
            key = token.read_text().strip()
            assert [await asked(url, "/metrics", one) for one in ("", "wrong", "w\xf6rong", key)] == [
                401,
                401,
                401,
                200,
            ]
            assert await asked(url, "/livez") == 200
            assert await asked(url, "/readyz") == 503, "it has not said that it is ready"
        role.close()


def test_roles_that_start_together_agree_on_one_key(tmp_path, monkeypatch):
    """The second one finds no key, and the first is quicker."""
    path = tmp_path / "health.token"
    first = own_key("health.token_file", None, path)
    monkeypatch.setattr("pathlib.Path.exists", lambda _: False)
    assert own_key("health.token_file", None, path) == first
    assert [file.name for file in tmp_path.iterdir()] == ["health.token"]


def test_a_key_that_is_named_is_never_made(tmp_path):
    with pytest.raises(ConfigError, match=r"health.token_file .* cannot be read"):
        own_key("health.token_file", tmp_path / "named", tmp_path / "health.token")
    assert not list(tmp_path.iterdir())
