"""Accumulator kinds: the kinds of accumulated parts that the statistics need."""

from collections.abc import Sequence
from typing import Any

from trocar_server.tensors.stats import covariance, histogram, peaks, quantiles, summary
from trocar_server.tensors.stats.statistic import Scope, Statistic, StatisticParameters
from trocar_server.tensors.stats.topic import Topic

SUMMARY = Statistic.COUNT
"""The key of all statistics that a `Summary` gives."""


def topics_for(
    statistics: Sequence[Statistic], scope: Scope, parameters: StatisticParameters
) -> dict[Statistic, Topic[Any]]:
    """Return the topics that the statistics need; always a summary."""
    topics: dict[Statistic, Topic[Any]] = {SUMMARY: summary.topic(scope, summary.needed_parts(statistics))}
    if Statistic.QUANTILES in statistics:
        topics[Statistic.QUANTILES] = quantiles.topic(scope, parameters.quantiles)
    if Statistic.HISTOGRAM in statistics:
        topics[Statistic.HISTOGRAM] = histogram.topic(scope, parameters)
    if Statistic.COVARIANCE in statistics:
        topics[Statistic.COVARIANCE] = covariance.topic()
    if Statistic.ARGMAX_CHANNEL in statistics:
        topics[Statistic.ARGMAX_CHANNEL] = peaks.topic(scope)
    return topics
