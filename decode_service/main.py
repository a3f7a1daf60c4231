"""`paceline decode`: runs a decode worker."""

from paceline.decode_service.service import SIDE
from paceline.worker import main
from paceline.worker.config import WorkerConfig


def run(config: WorkerConfig) -> int:
    """Blocks until SIGTERM or SIGINT, drains, returns 0. Raises ConfigError."""
    return main.run(config, SIDE)
