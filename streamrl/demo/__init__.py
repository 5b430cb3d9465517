"""The sort task, on which streamrl shows itself without network: `streamrl init --template sort` and `make demo`."""
