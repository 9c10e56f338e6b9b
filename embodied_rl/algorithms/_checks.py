"""Shape and dtype checks of the tensors given to the algorithms.

Broadcasting never happens by accident in this package: a `[B, 1]` beside a `[B, 7]` is an error, not a loss
that is seven times too large.
"""

from torch import Tensor
from torch import bool as torch_bool


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all the named tensors have one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"expected tensors of one shape (nothing is broadcast), got {given}")


def require_bool(**masks: Tensor) -> None:
    """Raise ValueError unless all the named masks are bool tensors."""
    for name, mask in masks.items():
        if mask.dtype != torch_bool:
            raise ValueError(f"{name} must be a bool tensor, got {mask.dtype}")
