"""Models that rewards ask over HTTP: the router of their servers, the text they get, and what their answers mean."""

from streamrl.consumers.models.client import ModelClient, open_models

__all__ = ["ModelClient", "open_models"]
