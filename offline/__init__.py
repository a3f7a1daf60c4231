"""The engine in the own process, for lists of prompts: `LLM`. No server, no network."""

from paceline.client.embedding import Embeddings, EmbedOptions
from paceline.client.options import Options
from paceline.client.result import Choice, Result
from paceline.offline.llm import LLM

__all__ = ["LLM", "Choice", "EmbedOptions", "Embeddings", "Options", "Result"]
