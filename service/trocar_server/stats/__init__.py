"""Summary numbers of feature maps, mergeable over batches; usable alone on any tensor.

    from trocar_server.stats import Scope, Statistic, reduce

    reduce(feature_map, [Statistic.MEAN, Statistic.STD], Scope.CHANNEL).values[Statistic.MEAN]

For more batches than fit in memory, feed an `Accumulator`.
"""

from trocar_server.stats.accumulator import Accumulator, reduce
from trocar_server.stats.statistic import Scope, Statistic, StatisticsResult, default_channel_dim

__all__ = ["Accumulator", "Scope", "Statistic", "StatisticsResult", "default_channel_dim", "reduce"]
