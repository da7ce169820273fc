"""Does this machine's GPU train? ZeRO 1 to 3 in bf16 with and without offload: tokens per second, memory, agreement.

    python benchmarks/device_check.py [--model NAME] [--minutes 5] [--out docs/device_check.md]

One process on one GPU (on a CPU it runs a tiny model through the same steps, which shows that the script works and says
nothing about speed). The table goes to the standard output, and to `--out`.
"""

import argparse
import gc
import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comlrl_core.algorithms import madpo
from comlrl_core.config.engine import EngineSettings
from comlrl_core.engine.build import build_engines
from comlrl_core.engine.protocol import OptimizerSettings
from comlrl_core.engine.weights import gathered
from comlrl_core.randomness import generator, stream_key
from comlrl_core.team.generation import Sampling, generate

SETTINGS = OptimizerSettings(1e-5)
PAIRS, UPDATES = 8, 4
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain PyTorch", {"kind": "local"}),
    ("ZeRO 1", {"zero_stage": 1}),
    ("ZeRO 2", {"zero_stage": 2}),
    ("ZeRO 3", {"zero_stage": 3}),
    ("ZeRO 2, optimizer on the CPU", {"zero_stage": 2, "offload_optimizer": "cpu"}),
    ("ZeRO 3, all on the CPU", {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    ("ZeRO 2, activations computed twice", {"zero_stage": 2, "gradient_checkpointing": True}),
)  # fmt: skip


def model_of(name: str | None, device: torch.device) -> PreTrainedModel:
    """`name` from its files; without one a random model of 0.5 B parameters, or of 0.1 M on a CPU."""
    if name is not None:
        from transformers import AutoModelForCausalLM

        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        return loaded.to(device).eval()  # type: ignore[arg-type]
    torch.manual_seed(0)
    size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    vocabulary, kv = 151_936, 2
    if device.type == "cpu":
        size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        vocabulary = 320
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=kv, tie_word_embeddings=True, **size)
    return Qwen2ForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()


def measure(case: dict[str, Any], name: str | None, device: torch.device, length: int) -> dict[str, Any]:
    """One configuration: losses, tokens per second of rollout and update, peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model_of(name, device)
    engine = EngineSettings.model_validate({"kind": "deepspeed"} | case)
    engines = build_engines([model], SETTINGS, engine)
    vocabulary = int(model.config.get_text_config().vocab_size)
    draw = generator("device check")

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(n) for n in draw.integers(3, vocabulary, size=count))

    pairs = [
        madpo.PairTokens(prompts=(ids(length // 2),), winners=(ids(length // 2),), losers=(ids(length // 2),))
        for _ in range(PAIRS)
    ]
    settings = madpo.MADPOUpdateSettings(beta=0.1, train_batch_size=PAIRS, micro_batch_size=4, num_train_epochs=UPDATES)
    times: list[float] = [time.perf_counter()]
    history = madpo.update(
        [model], engines, [0], pairs, settings,
        reference=None, order=lambda _: range(PAIRS), on_step=lambda _: times.append(time.perf_counter()),
    )  # fmt: skip
    update_seconds = (times[-1] - times[1]) / (UPDATES - 1)  # the first one warms up
    prompts = [pair.prompts[0] for pair in pairs]
    start = time.perf_counter()
    with gathered(model):
        drawn = generate(
            model, prompts, num_samples=4, sampling=Sampling(length // 2),
            keys=[[stream_key("device check", p, k) for k in range(4)] for p in range(PAIRS)], eos_ids=[], pad_id=0,
        )  # fmt: skip
    rollout_seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    tokens = sum(len(one.token_ids) for of_prompt in drawn for one in of_prompt)
    return {
        "losses": [metrics["loss"] for metrics in history],
        "update": PAIRS * 2 * length / update_seconds,
        "rollout": tokens / rollout_seconds,
        "memory": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face name or folder (default: random weights)")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no configuration after so many minutes")
    parser.add_argument("--out", type=Path, help="also write the table there")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else f"no GPU ({platform.processor() or 'CPU'})"
    length = 512 if device.type == "cuda" else 32
    work = f"{arguments.model or 'random weights'}, bf16, {PAIRS} pairs of 2 x {length} tokens"
    lines = [
        f"{gpu}; PyTorch {torch.__version__}; {work}",
        "",
        "| engine | update, tokens/s | rollout, tokens/s | peak memory, GiB | last loss | largest loss difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    begin = time.monotonic()
    expected: list[float] | None = None
    for title, case in CASES:
        if time.monotonic() - begin > arguments.minutes * 60:
            lines.append(f"| {title} | left out: the time is over | | | | |")
            continue
        found = measure(case, arguments.model, device, length)
        expected = expected or found["losses"]
        apart = max(abs(one - other) for one, other in zip(found["losses"], expected, strict=True))
        lines.append(
            f"| {title} | {found['update']:,.0f} | {found['rollout']:,.0f} | {found['memory']:.2f} "
            f"| {found['losses'][-1]:.4f} | {apart:.1e} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
