"""The gateway of a reward worker: programs in any language fetch samples and post scores (docs/guides/gateway.md)."""
