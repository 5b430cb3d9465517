"""Figures by source: their number is bounded, and heartbeats bring them to `lag` and `/metrics`."""

import aiohttp
import orjson
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import HealthConfig, RunConfig
from streamrl.monitor.snapshot import take
from streamrl.queues import Role, open_ledgers
from streamrl.queues.keys import SOURCE_FIGURES
from streamrl.runtime.health import serve_health
from streamrl.sources import MOST_SOURCES, series_of


@given(st.lists(st.integers(0, 40).map(str)))
def test_a_thousand_sources_make_few_series_and_none_changes_its_name(sources):
    known = set()
    found = [series_of(source, known) for source in sources]
    first = list(dict.fromkeys(sources))[:MOST_SOURCES]
    assert found == [source if source in first else "other" for source in sources]


async def test_heartbeats_bring_figures_by_source_to_lag_and_metrics(redis_run):
    config = RunConfig.model_validate({"name": "t", "redis": redis_run.config.model_dump()})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        learner, feeder = (Role(name, config, redis_run.run_dir, ledgers) for name in ("learner.0", "feeder.0"))
        learner.status[SOURCE_FIGURES] = orjson.dumps({"a": {"groups": 3, "length": 2.5}, "b": {"groups": 1}}).decode()
        feeder.status[SOURCE_FIGURES] = orjson.dumps({'say "a"\n': {"accuracy": 0.5}, "b": {"accuracy": 1.0}}).decode()
        for role in (learner, feeder):
            await role.beat()
        shown = await take(ledgers.connection, config.name)
        assert shown.sources == {
            "a": {"groups": 3, "length": 2.5},
            "b": {"groups": 1, "accuracy": 1.0},
            'say "a"\n': {"accuracy": 0.5},
        }
        assert SOURCE_FIGURES not in shown.roles["learner.0"]
        texts = {}
        for role in (learner, feeder):
            async with serve_health(role, HealthConfig()) as url, aiohttp.ClientSession() as session:
                key = (redis_run.run_dir / "health.token").read_text().strip()
                async with session.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}) as answer:
                    texts[role.name] = await answer.text()
            role.close()
    assert 'streamrl_learner_source_groups{role="learner.0",run="t",source="b"} 1.0' in texts["learner.0"]
    assert texts["learner.0"].count("# TYPE streamrl_learner_source_groups gauge") == 1
    assert r'streamrl_feeder_source_accuracy{role="feeder.0",run="t",source="say \"a\"\n"} 0.5' in texts["feeder.0"]
