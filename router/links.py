"""What a pull of KV from one worker to another costs a request, in tokens of prefill.

Decode pulls while prefill computes, so what counts is by how much the pull is longer, and its last
piece. Its time follows from what the reader measured of the link. Labels count whatever was
measured: traffic between zones is dear, and between nodes it is shared.
"""

LAST_SHARE = 1 / 16  # of a pull that begins when the prompt is done
ZONE_COST = 0.25  # of a token that is pulled from another zone
NODE_COST = 1 / 64  # and from another node of the zone

Place = tuple[str, str]  # zone and node, as the operator names them; empty: nothing was said
NOWHERE: Place = ("", "")


def distance_cost(one: Place, other: Place) -> float:
    """Of a token."""
    if one == other:
        return 0.0
    for label, far, cost in zip(one, other, (ZONE_COST, NODE_COST), strict=True):
        if label and far and label != far:
            return cost
    return 0.0


def seen_cost(pull: float, computed: float) -> float:
    """Of a pull, while a prompt is computed that costs its worker `computed`."""
    if pull > computed:
        return pull - computed + LAST_SHARE * computed
    return LAST_SHARE * pull
