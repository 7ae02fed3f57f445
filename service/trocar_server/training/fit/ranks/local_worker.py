"""Local worker: the process of a rank that rank 0 has started on its own machine; see `local_ranks`."""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from trocar_server.training.fit.ranks.local_ranks import unpickled
from trocar_server.training.fit.ranks.rank_group import LOOPBACK, RankGroup, file_store
from trocar_server.training.fit.ranks.rank_worker import RankModel, build, serve


def main() -> None:
    """Run `local_ranks.COMMAND` with the arguments FD, FOLDER, RANK and SIZE."""
    descriptor, name, rank, size = sys.argv[1:]
    channel, folder = Connection(int(descriptor)), Path(name)

    def built() -> RankModel:
        job, threads = unpickled(channel)
        return build(job, folder, threads, has_weights=True)

    def join() -> RankGroup:
        return RankGroup(file_store(folder, int(size)), LOOPBACK, int(rank), int(size))

    with suppress(EOFError, OSError, KeyboardInterrupt):  # the fit has ended
        serve(channel, built, join)
