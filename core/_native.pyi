def chain_keys(parent: bytes, packed_token_ids: bytes) -> bytes:
    """Concatenated 32-byte keys of the full 16-token blocks. Releases the GIL."""

def chain_keys_portable(parent: bytes, packed_token_ids: bytes) -> bytes:
    """The same without CPU extensions, for tests of that path."""
