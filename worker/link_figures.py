"""What routers are told of links: the time that the KV of a token takes."""

from collections.abc import Iterable

from paceline.v1 import worker_pb2
from paceline.worker.peers import Peer


def link_figures(peers: Iterable[Peer], num_groups: int) -> list[worker_pb2.LinkFigure]:
    """Of those that were measured: by pulls, else by their self-test. A token has a share of a page
    of each of `num_groups`."""
    figures = []
    for peer in peers:
        pulled = peer.statistics.figures
        if pulled.num_pieces:
            speed = pulled.bytes_per_second
        elif peer.speed is not None:
            speed = peer.speed.bytes_per_second
        else:
            continue
        token_us = 1e6 * max(1, num_groups) * peer.statistics.token_bytes / speed
        figures.append(worker_pb2.LinkFigure(source=peer.key[0], token_us=token_us))
    return figures
