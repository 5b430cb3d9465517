"""All that is known of vLLM, SGLang and other servers: how they are made, started and spoken to."""
