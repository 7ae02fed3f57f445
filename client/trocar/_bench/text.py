"""Labels of cases in tables, plots and on the terminal."""

from trocar._bench.case import Case


def case_text(case: Case, *, with_rate: bool = True) -> str:
    """Name a case, for example `resnet18 layer4, batch 1, 8 clients, fast`."""
    parts = [f"{case.model_id} {' '.join(case.taps)}", f"batch {case.batch}"]
    parts.append(f"{case.clients} client{'s' if case.clients > 1 else ''}")
    if case.numerics is not None:
        parts.append(case.numerics)
    if with_rate and case.rate is not None:
        parts.append(rate_text(case))
    return ", ".join(parts)


def rate_text(case: Case) -> str:
    """Write the rate of a case: `50/s`, `0.5x`; nothing for a closed loop."""
    if case.rate is None:
        return ""
    return f"{case.rate.value:g}{'x' if case.rate.is_multiple else '/s'}"
