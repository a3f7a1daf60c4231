import pytest
import torch

from paceline.kv_transfer import cuda_driver
from paceline.kv_transfer.cuda_driver import DriverError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(DriverError, match=r"libcuda.so.1|cuInit"):
        cuda_driver.granularity(0)
