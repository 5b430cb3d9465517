"""Tests that the last run skipped: they are remembered, and `--only-skipped` runs these and no others.

`make test` needs nothing but what the Makefile installs: tests of other programs are skipped where those are missing.
CI runs it on a bare machine, then installs the programs and runs what was skipped, instead of every fast test twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_REMEMBERED = "tests/skipped"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--only-skipped`."""
    parser.addoption("--only-skipped", action="store_true", help="run only the tests that the last run skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Remember which tests are skipped."""
    config.pluginmanager.register(Skipped(config))


class Gone(pytest.Item):
    """Fails in the place of a test that was skipped and cannot be found any more."""

    def runtest(self) -> None:
        """Say which one."""
        pytest.fail(f"{self.name} was skipped by the last run and is not there now", pytrace=False)


class Skipped:
    """A plugin of pytest; the cache of pytest (`.pytest_cache`) remembers the ids."""

    def __init__(self, config: pytest.Config) -> None:
        self.only: bool = config.getoption("--only-skipped")
        self.now: set[str] = set()
        remembered = config.cache.get(_REMEMBERED, None) if config.cache else None
        if self.only and remembered is None:
            raise pytest.UsageError("--only-skipped: no run is remembered; run `make test` first")
        self.last: set[str] = set(remembered or ())
        self.files = {config.rootpath / name.partition("::")[0] for name in self.last}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out files without a test of interest."""
        return True if self.only and collection_path.is_file() and collection_path not in self.files else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep what the last run skipped, before markers choose among it."""
        if not self.only:
            return
        gone = sorted(self.last - {item.nodeid for item in items})
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.last])
        items[:] = [item for item in items if item.nodeid in self.last]
        items += [Gone.from_parent(session, name=name) for name in gone]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notice a skipped test."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.now.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Remember them. A worker of xdist reports to the process that started it."""
        if self.only:
            if not self.last and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
                session.exitstatus = pytest.ExitCode.OK
        elif not (hasattr(session.config, "workerinput") or session.config.option.collectonly):
            session.config.cache.set(_REMEMBERED, sorted(self.now))
