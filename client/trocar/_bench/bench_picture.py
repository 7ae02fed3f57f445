"""Benchmark plot; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from trocar._bench.text import case_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._bench.case import Result

_SHARES = (("p50", "p50_s", "#2c6fbb"), ("p90", "p90_s", "#f39c12"), ("p99", "p99_s", "#c0392b"))
_INCHES_PER_CASE = 0.5


def draw(results: Sequence[Result]) -> Figure:
    """Draw latencies against rates where there are several, and bars of all cases otherwise."""
    swept = [result for result in results if result.rate_per_s is not None]
    return _draw_rates(swept) if len(swept) > 1 else _draw_bars(results)


def _draw_rates(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(8, 7), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(case_text(result.case, with_rate=False), []).append(result)
    for index, (name, members) in enumerate(groups.items()):
        ordered = sorted(members, key=lambda result: result.rate_per_s or 0)
        rates = [result.rate_per_s or 0 for result in ordered]
        for (share, field, _), style in zip(_SHARES, ("-", "--", ":"), strict=True):
            times = [getattr(result.calls, field) * 1e3 for result in ordered]
            upper.plot(
                rates, times, style, marker="o", markersize=3, color=f"C{index}", label=f"{name} {share}"
            )
        answered = [result.calls.calls_per_s for result in ordered]
        lower.plot(rates, answered, "o-", markersize=3, color=f"C{index}", label=name)
    most = max(result.rate_per_s or 0 for result in results)
    lower.plot([0, most], [0, most], color="grey", linewidth=0.8, label="all that were due")
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:g}")
    upper.yaxis.set_minor_formatter("{x:g}")
    upper.set_ylabel("ms from when a call was due")
    lower.set_ylabel("answered calls per second")
    lower.set_xlabel("calls due per second")
    upper.legend(fontsize=7)
    lower.legend(fontsize=7)
    return figure


def _draw_bars(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(9, 1.6 + _INCHES_PER_CASE * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(results))
    for offset, (share, field, color) in zip((-0.27, 0, 0.27), _SHARES, strict=True):
        times = [getattr(result.calls, field) * 1e3 for result in results]
        left.barh([place + offset for place in places], times, height=0.25, color=color, label=share)
    right.barh(places, [result.calls.images_per_s for result in results], height=0.6, color="#2c6fbb")
    own = [(place, result.local) for place, result in enumerate(results) if result.local is not None]
    if own:
        left.plot(
            [r.p50_s * 1e3 for _, r in own], [place for place, _ in own], "k|", ms=14, label="local p50"
        )
        right.plot([r.images_per_s for _, r in own], [place for place, _ in own], "k|", ms=14, label="local")
        right.legend(fontsize=7)
    left.set_yticks(places, [case_text(result.case) for result in results], fontsize=7)
    left.invert_yaxis()
    left.set_xlabel("ms")
    right.set_xlabel("images per second")
    left.legend(fontsize=7)
    return figure
