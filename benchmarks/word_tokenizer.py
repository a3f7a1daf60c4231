"""A tokenizer whose every token is a visible word, for models of which only the work counts."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Token i is ` wi`. Prompts are token ids: it has no merges."""
    tokenizer = Tokenizer(BPE({f"Ġw{i}": i for i in range(vocab_size)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
