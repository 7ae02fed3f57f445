"""Result table of `trocar bench`."""

from collections.abc import Mapping, Sequence

from trocar._bench.case import Result
from trocar._bench.text import rate_text
from trocar._cli.console import Rows, table

_NUMBERS = ("batch", "clients", "p50", "p90", "p99", "max", "mean", "calls/s", "images/s", "queue", "compute")


def bench_table(results: Sequence[Result]) -> Rows:
    """Return all cases as a table; times are in ms. Empty columns are left out."""
    shown = [_cells(result) for result in results]
    titles = [title for title in shown[0] if any(row[title] for row in shown)]
    rows = table(
        *titles, right=(*_NUMBERS, "due/s", "local p50", "latency ratio", "images ratio", "late p99", "rows")
    )
    for row in shown:
        rows.add_row(*(row[title] for title in titles))
    return rows


def _cells(result: Result) -> dict[str, str]:
    case, calls, local = result.case, result.calls, result.local
    is_open = result.rate_per_s is not None
    return {
        "model": case.model_id,
        "taps": " ".join(case.taps),
        "batch": str(case.batch),
        "clients": str(case.clients),
        "asked": case.numerics or "",
        "used": _shares(calls.numerics),
        "engine": _shares(calls.engines),
        "rate": rate_text(case),
        "due/s": f"{result.rate_per_s:.1f}" if is_open else "",
        "p50": _ms(calls.p50_s),
        "p90": _ms(calls.p90_s),
        "p99": _ms(calls.p99_s),
        "max": _ms(calls.max_s),
        "mean": _ms(calls.mean_s),
        "queue": _ms(calls.queue_p50_s),
        "compute": _ms(calls.compute_p50_s),
        "calls/s": f"{calls.calls_per_s:.1f}",
        "images/s": f"{calls.images_per_s:.1f}",
        "late p99": _ms(calls.send_lag_p99_s) if is_open else "",
        "local p50": _ms(local.p50_s) if local else "",
        "latency ratio": f"{local.latency_ratio:.2f}" if local else "",
        "images ratio": f"{local.throughput_ratio:.2f}" if local else "",
        "rows": f"{calls.rows_mean:.1f}" if calls.rows_mean > case.batch else "",
        "cached": str(calls.cached_count or ""),
        "errors": ", ".join(f"{count} {reason}" for reason, count in calls.errors.items()),
    }


def _shares(counts: Mapping[str, int]) -> str:
    """List the values used, most frequent first; with shares if they varied."""
    named = {name: count for name, count in counts.items() if name}
    total = sum(counts.values())
    ordered = sorted(named, key=lambda name: -named[name])
    if len(counts) == 1:
        return "".join(ordered)
    return ", ".join(f"{name} {named[name] / total:.0%}" for name in ordered)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
