"""Client library over gRPC: `Client` and `AsyncClient`. Loads nothing of a server."""

from paceline.client.aio import AsyncClient
from paceline.client.embedding import Embeddings, EmbedOptions
from paceline.client.options import Options
from paceline.client.result import Choice, Part, Result
from paceline.client.sync import Client

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "EmbedOptions",
    "Embeddings",
    "Options",
    "Part",
    "Result",
]
