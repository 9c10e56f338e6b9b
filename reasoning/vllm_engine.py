"""Sampling by vLLM, on one GPU for each rank of the sampler. Takes whole networks, no adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from reasoning.config import MathConfig
from reasoning.generate import Request
from reasoning.models import ModelError, model_directory
from reasoning.recipe import VLLM
from reasoning.samples import Completion, Sampling

MEMORY_SHARE = 0.4  # of the GPU, for weights and keys and values; the rest is the actor's


class VLLMEngine:
    """Holds the model in this process, so that new weights are copied on the device.

    Raises ModelError where vLLM is not installed.
    """

    def __init__(self, config: MathConfig, stop_id: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm
        except ImportError:
            raise ModelError(f"sampling.engine=vllm takes vLLM, which is not installed: {VLLM}") from None
        self._vllm, self._stop_id = vllm, stop_id
        self._llm: Any = vllm.LLM(
            model=str(model_directory(config.model.path)),
            dtype=config.model.dtype,
            seed=config.seed,
            gpu_memory_utilization=MEMORY_SHARE,
            max_num_seqs=config.sampling.max_rows,
            max_model_len=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
            enable_prefix_caching=True,
            enable_sleep_mode=True,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
        )
        self._held: dict[str, Tensor] = {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        engine = self._llm.llm_engine
        done: dict[int, dict[int, Completion]] = {number: {} for number in range(len(requests))}
        for number, request in enumerate(requests):
            for place, seed in enumerate(request.seeds):
                settings = self._vllm.SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_new_tokens,
                    seed=seed,
                    logprobs=0,
                    stop_token_ids=[self._stop_id],
                    detokenize=False,
                )
                engine.add_request(f"{number}.{place}", {"prompt_token_ids": request.ids}, settings)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                number, place = map(int, output.request_id.split(".")[:2])
                sample = output.outputs[0]
                ids = list(sample.token_ids)
                logprobs = [found[token].logprob for found, token in zip(sample.logprobs, ids, strict=True)]
                done[number][place] = Completion(ids, logprobs, sample.finish_reason == "stop")
                if len(done[number]) == len(requests[number].seeds):
                    yield number, [done[number][place] for place in range(len(requests[number].seeds))]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._held = dict(weights)
        model = self._llm.llm_engine.model_executor.driver_worker.model_runner.model
        model.load_weights(iter(self._held.items()))
        self._llm.reset_prefix_cache()

    def weights(self) -> dict[str, Tensor]:
        return self._held

    def offload(self) -> None:
        self._llm.sleep(level=1)

    def onload(self) -> None:
        self._llm.wake_up()
