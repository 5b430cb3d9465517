"""The deepest error of logs that vLLM 0.32 and SGLang 0.5.23 have written (on a CPU, shortened)."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.servers.process import points_back, root_cause

LOGS = Path(__file__).parents[1] / "data" / "server_logs"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("vllm_request", "RuntimeError: Unsupported CPU attention configuration: head_dim=24 isa=1 kv_cache_idx=0"),
        ("vllm_start", "ValueError: No available memory for the cache blocks."),
        ("sglang_start", "ValueError: Loaded weights leave no GPU memory for the KV cache"),
    ],
)
def test_the_cause_in_a_recorded_log(name: str, cause: str):
    assert root_cause((LOGS / f"{name}.log").read_text()).startswith(cause)


def test_errors_that_only_point_to_another():
    assert points_back(
        "the server failed: EngineCore encountered an issue. See stack trace (above) for the root cause."
    )
    assert points_back("RuntimeError: Initialization failed. Please see the error messages above.")
    assert not points_back("the server has a context of 32 tokens, the run needs 64")


TWO_WORKERS = """
(Worker_TP0 pid=7) ERROR 11-24 21:25:14 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker_TP1 pid=8) ERROR 11-24 21:25:14 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker_TP0 pid=7) ERROR 11-24 21:25:14 [multiproc_executor.py:1063]   File "x.py", line 1, in f
(Worker_TP1 pid=8) ERROR 11-24 21:25:14 [multiproc_executor.py:1063]   File "x.py", line 1, in f
Note: this line belongs to no traceback
(Worker_TP1 pid=8) ERROR 11-24 21:25:14 [multiproc_executor.py:1063] torch.OutOfMemoryError: CUDA out of memory.
(Worker_TP0 pid=7) ERROR 11-24 21:25:14 [multiproc_executor.py:1063] EOFError
"""
CHAIN = """
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "x.py", line 1, in f
(APIServer pid=1) OSError: no file model.safetensors
(APIServer pid=1)
(APIServer pid=1) The above exception was the direct cause of the following exception:
(APIServer pid=1)
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "x.py", line 2, in f
(APIServer pid=1) RuntimeError: cannot load
"""
CONFIGURATION = """
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=1)   Value error, max_model_len is above 32
(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2/v/value_error
"""
TIMEOUT = """
requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='hub'): Max retries exceeded
"""
BACK = """
ValueError: an older one
RuntimeError: the first of a chain

The above exception was the direct cause of the following exception:

RuntimeError: Engine core initialization failed. See root cause above.
OSError: No space left on device
"""
HARMLESS = """
WARNING 11-24 21:25:14 [x.py:1] Traceback (most recent call last):
WARNING 11-24 21:25:14 [x.py:1] ImportError: no triton
INFO:     Started server process [1]
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (TWO_WORKERS, "torch.OutOfMemoryError: CUDA out of memory."),
        (CHAIN, "OSError: no file model.safetensors"),
        (
            CONFIGURATION,
            "pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, max_model_len is above 32",
        ),
        (TIMEOUT, TIMEOUT.strip()),
        (BACK, "OSError: No space left on device"),
        (HARMLESS, ""),
        ("", ""),
    ],
)
def test_the_cause_in_the_ways_that_servers_write(log: str, cause: str):
    assert root_cause(log) == cause
