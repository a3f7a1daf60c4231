"""`paceline prefill`: runs a prefill worker."""

from paceline.worker.config import WorkerConfig
from paceline.worker.rank_program import started_ahead


def run(config: WorkerConfig) -> int:
    """Blocks until SIGTERM or SIGINT, drains, returns 0. Raises ConfigError."""
    with started_ahead() as first_rank:
        # Imported while the rank imports torch.
        from paceline.prefill_service.service import SIDE
        from paceline.worker import main

        return main.run(config, SIDE, first_rank)
