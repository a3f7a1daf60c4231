"""Whether a device can be had here. Imports torch: not for a front."""

import torch

from paceline.core.errors import ConfigError


def check_device(device: str) -> None:
    """Raises ConfigError when torch finds no such device on this machine."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return
    if not torch.cuda.is_available():
        reason = "torch finds no CUDA device on this machine; --device cpu needs none"
        raise ConfigError("device", device, reason)
    if (wanted.index or 0) >= torch.cuda.device_count():
        reason = f"torch finds only {torch.cuda.device_count()} CUDA devices on this machine"
        raise ConfigError("device", device, reason)
