"""The value head: which state it reads, its size, its precision."""

from __future__ import annotations

import pytest
import torch

from policies.value_head import ValueHead, ValuePosition

HIDDEN = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("position", "state"), [("first", HIDDEN[:, 0]), ("last", HIDDEN[:, -1]), ("mean", HIDDEN.mean(1))]
)
def test_the_position_decides_which_state_is_read(position: ValuePosition, state: torch.Tensor) -> None:
    head = ValueHead(16, (8,), position)
    torch.testing.assert_close(head(HIDDEN), head.layers(state)[:, 0])


def test_the_published_head_has_two_hidden_layers_and_no_last_bias() -> None:
    shapes = {name: tuple(p.shape) for name, p in ValueHead(4096).named_parameters()}
    assert shapes == {
        "layers.0.weight": (512, 4096),
        "layers.0.bias": (512,),
        "layers.2.weight": (128, 512),
        "layers.2.bias": (128,),
        "layers.4.weight": (1, 128),
    }


def test_each_action_of_a_chunk_can_have_a_value() -> None:
    head = ValueHead(16, (8,), actions=5)
    assert head(HIDDEN).shape == (3, 5)
    assert ValueHead(16, (8,), actions=1)(HIDDEN).shape == (3, 1)


def test_half_precision_states_are_valued_in_float32() -> None:
    head = ValueHead(16, ())
    value = head(HIDDEN.bfloat16())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, head(HIDDEN.bfloat16().float()), rtol=0, atol=0)


def test_an_unknown_position_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown value position 'a0'; expected first, last or mean"):
        ValueHead(16, (), "a0")  # type: ignore[arg-type]
