"""What nixl's source tells a reader inside of its hello."""

import msgspec


class NixlEndpoint(msgspec.Struct, frozen=True, array_like=True):
    metadata: bytes  # of the agent: its network addresses, and the keys that read its memory
    base_address: int  # of the pool in the source's memory
