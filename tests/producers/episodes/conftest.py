"""Fixtures for episodes."""

from __future__ import annotations

import contextlib

import pytest

from .endpoint_kit import Served


@pytest.fixture
async def serve():
    """Open samples; they are closed after the test."""
    stack = contextlib.AsyncExitStack()

    async def open_sample(*texts, **episode):
        return await stack.enter_async_context(Served(texts, **episode).open())

    async with stack:
        yield open_sample
