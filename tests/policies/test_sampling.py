"""Drawing tokens: distribution, truncation, and what temperature means."""

from __future__ import annotations

import pytest
import torch

from policies.sampling import Sampling

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def shares(sampling: Sampling, logits: torch.Tensor = LOGITS, draws: int = 4000) -> torch.Tensor:
    """How often each option is drawn when the random numbers are spread evenly over (0, 1)."""
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    chosen = sampling.choose(logits.expand(draws, -1), uniform)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_options_are_drawn_as_often_as_their_logprob_says(temperature: float) -> None:
    sampling = Sampling(temperature)
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(sampling.log_probabilities(LOGITS).exp(), expected)
    torch.testing.assert_close(shares(sampling)[None], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(top_k=2), [0.625, 0.375, 0.0, 0.0]),
        (Sampling(top_p=0.5), [1.0, 0.0, 0.0, 0.0]),
        (Sampling(top_p=0.51), [0.625, 0.375, 0.0, 0.0]),
        (Sampling(top_p=1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=3, top_p=0.6), [0.625, 0.375, 0.0, 0.0]),
        (Sampling(top_k=99), [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_truncated_distributions(sampling: Sampling, expected: list[float]) -> None:
    torch.testing.assert_close(shares(sampling), torch.tensor(expected), rtol=0, atol=1e-3)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(shares(sampling, LOGITS[:, order]), torch.tensor(expected)[order], rtol=0, atol=1e-3)


def test_the_first_and_last_random_numbers_stay_inside() -> None:
    uniform = torch.tensor([2.0**-54, 1.0], dtype=torch.float64)
    logits = torch.tensor([[-1e4, 0.0, 0.0, -1e4]]).expand(2, -1)
    assert Sampling().choose(logits, uniform).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Sampling(**wrong)  # type: ignore[arg-type]
