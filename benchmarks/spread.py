"""Medians and spread of alternating runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of the runs, and the runs themselves."""
    rounded = [float(f"{value:.4g}") for value in values]
    return {
        "median": float(f"{statistics.median(values):.4g}"),
        "least": min(rounded),
        "greatest": max(rounded),
        "runs": rounded,
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Spread of the ratios within each round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def table(title: str, figures: dict[str, Any], indent: str = "  ") -> None:
    """Print figures, one a line; what has a median with its spread."""
    print(f"{indent[2:]}{title}")
    for name, value in figures.items():
        if isinstance(value, dict) and "median" in value:
            print(f"{indent}{name:44} {value['median']:>10.4g}   ({value['least']:.4g} to {value['greatest']:.4g})")
        elif isinstance(value, dict):
            table(name, value, indent + "  ")
        else:
            print(f"{indent}{name:44} {' '.join(map(str, value)) if isinstance(value, list) else value:>10}")
