"""Comparing state dicts before one is loaded into another."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def shapes(state: Mapping[str, Tensor]) -> Shapes:
    """The shape of every tensor."""
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def state_faults(expected: Shapes, given: Shapes) -> str:
    """Every key of a state dict that is missing, unexpected or misshapen, one on each line; empty if all is well."""
    missing = [f"  missing: {key} {list(shape)}" for key, shape in expected.items() if key not in given]
    unexpected = [f"  unexpected: {key} {list(shape)}" for key, shape in given.items() if key not in expected]
    misshapen = [
        f"  misshapen: {key} is {list(given[key])}, expected {list(shape)}"
        for key, shape in expected.items()
        if key in given and given[key] != shape
    ]
    return "\n".join(missing + unexpected + misshapen)
