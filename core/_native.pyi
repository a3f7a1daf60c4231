def chain_keys(parent: bytes, packed_token_ids: bytes) -> bytes:
    """Concatenated 32-byte keys of the full 16-token blocks. Releases the GIL."""
