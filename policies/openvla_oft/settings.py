"""How a checkpoint of OpenVLA-OFT is used: OpenVLA's options, and what the checkpoint does not tell of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from policies.action_tokens import OFT_EPSILON, ActionStatistics, Bounds, action_statistics
from policies.openvla.settings import OpenVLASettings, require, require_list, require_whole

Head = Literal["tokens", "l1"]
Layout = Literal["official", "simplevla", "rlinf"]
ValueOf = Literal["chunk", "action"]


@dataclass(frozen=True)
class OpenVLAOFTSettings(OpenVLASettings):
    """How a checkpoint is used; none of these is written in it. See `OpenVLASettings` for the rest.

    Attributes:
        chunk: actions of one decision, C.
        layout: of the sequence that it was trained with. `official` and `simplevla` end it with `</s>`, `rlinf` does
            not, and adds the statistics of `dataset_statistics.json` to those of `config.json` instead of replacing
            them.
        head: `tokens` are sampled and scored; `l1` regresses actions, which can only be evaluated.
        more_views: cameras shown after `view`, such as the wrist's.
        proprioception: the state of the robot is read, through a projector.
        film: the instruction modulates the vision towers.
        bounds: which statistics became -1 and 1; `extremes` in ALOHA.
        value_of: one value for the chunk, or one for each of its actions.
    """

    KIND: ClassVar[str] = "openvla_oft"
    LASTING: ClassVar[tuple[str, ...]] = (
        *OpenVLASettings.LASTING,
        *("chunk", "layout", "head", "more_views", "proprioception", "film", "bounds"),
    )

    epsilon: float = OFT_EPSILON
    chunk: int = 8
    layout: Layout = "official"
    head: Head = "tokens"
    more_views: tuple[int, ...] = ()
    proprioception: bool = False
    film: bool = False
    bounds: Bounds = "quantiles"
    value_of: ValueOf = "chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("layout", self.layout, get_args(Layout))
        require("head", self.head, get_args(Head))
        require("bounds", self.bounds, get_args(Bounds))
        require("value_of", self.value_of, get_args(ValueOf))
        require_whole("chunk", self.chunk, 1)
        require_list("more_views", self.more_views)
        for view in self.more_views:
            require_whole("more_views", view, 0)

    def statistics(self, norm_stats: dict[str, Any], of: str = "action") -> ActionStatistics:
        return action_statistics(norm_stats, self.unnorm_key, self.bounds, of)

    @property
    def views(self) -> tuple[int, ...]:
        """All cameras that are shown, in order."""
        return (self.view, *self.more_views)
