"""Arrays come to the device as they are, aligned, and back."""

import numpy as np
import pytest
import torch

from paceline.kernels.transfer import to_device, to_host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_and_back() -> None:
    arrays = (
        np.arange(5),
        np.zeros(0, np.int64),
        np.array([0.5, -3, np.inf], np.float32),
        np.arange(24).reshape(2, 3, 4)[:, ::2],
    )
    tensors = to_device(torch.device("cuda"), *arrays)
    back = [to_host(tensor) for tensor in tensors]
    torch.cuda.synchronize()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if len(tensor))
    for array, tensor in zip(arrays, back, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
