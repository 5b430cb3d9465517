"""Engines in processes of their own: vLLM, SGLang and other servers, spoken to over HTTP."""
