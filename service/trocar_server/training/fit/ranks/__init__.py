"""Ranks of a data-parallel fit: the trainer, and processes that compute gradients for it, on any node.

DataParallel -- Workers -- RankLauncher -- LocalRanks: child processes, pipes
                                        -- PlacedRanks: processes that Ray places, sockets
"""
