"""One small module per command of `streamrl`, imported by `streamrl.cli` inside the command (start-up stays fast)."""
