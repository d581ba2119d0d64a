"""gLLM: token throttling in pipelines. Facts and figures: shared notes of the paper's public pages; see `source`."""

from __future__ import annotations

from experiments.cards.card import Card, Claim, changes, little, untestable

SARATHI = "policy=chunked_prefill"
THROTTLING = "policy=token_throttling"
KNOB = ("sarathi 2048", "sarathi 1024", "sarathi 512", "sarathi 256")
SHORT, LONG = "short prompts", "long prompts"

CARD = Card(
    name="gllm_sc25",
    title="gLLM: global balanced pipeline parallelism with token throttling (SC'25)",
    source="arXiv 2504.14775 v2, by its public summaries (figures 15 and 16 as they are told there)",
    setting=("model=qwen2.5-32b", "device=l20", "parallel=pp4", "workload=poisson", "workload.max_length=4096"),
    arms={
        "throttling": (THROTTLING,),
        "without WT": ("policy=token_throttling_no_wt",),
        "without UT": ("policy=token_throttling_no_ut",),
        **{name: (SARATHI, f"policy.budget.tokens={name.split()[1]}") for name in KNOB},
        "T=1": (THROTTLING, "policy.budget.spread=1"),
        "T=16": (THROTTLING, "policy.budget.spread=16"),
        "MaxP=512": (THROTTLING, "policy.budget.max_prefill=512"),
        "MinP=16": (THROTTLING, "policy.budget.min_prefill=16"),
        "MinP=64": (THROTTLING, "policy.budget.min_prefill=64"),
        "threshold 0": ("policy=token_throttling_no_threshold",),
    },
    loads={
        SHORT: (
            "workload.requests=600",
            "workload.rate=8",
            "workload.lengths.prompt.mean=225",
            "workload.lengths.output.mean=157",
        ),
        LONG: (
            "workload.requests=300",
            "workload.rate=2",
            "workload.lengths.prompt.mean=1155",
            "workload.lengths.output.mean=211",
            "kv.blocks=6000",
        ),
    },
    knob=KNOB,
    claims=(
        Claim(
            "lower end-to-end latency than Sarathi's batching",
            "E2EL grows at 0.14 to 0.92 times the baselines' slope (4.2)",
            changes("throttling", KNOB[0], SHORT, "mean_e2el_ms", True, (-0.86, -0.08), KNOB),
        ),
        Claim(
            "higher throughput",
            "maximum throughput +11 to +398 % (abstract); runtime included",
            changes("throttling", KNOB[0], SHORT, "output_throughput", False, (0.11, 3.98), KNOB),
        ),
        Claim(
            "fewer bubbles",
            "the paper's aim; figure 1 shows even token counts",
            changes("throttling", KNOB[0], SHORT, "bubble_ratio", True, None, KNOB),
        ),
        Claim(
            "even token counts",
            "figure 1: tokens of each iteration vary less",
            changes("throttling", KNOB[0], SHORT, "cv_tokens_per_step", True, None, KNOB),
        ),
        Claim(
            "without WT: lower TTFT",
            "-10 % (fig. 15)",
            changes("without WT", "throttling", LONG, "mean_ttft_ms", True, (-0.2, -0.05)),
        ),
        Claim(
            "without WT: higher TPOT",
            "+44 % (fig. 15)",
            changes("without WT", "throttling", LONG, "mean_tpot_ms", False, (0.22, 0.88)),
        ),
        Claim(
            "without WT: higher E2EL",
            "+20 % (fig. 15)",
            changes("without WT", "throttling", LONG, "mean_e2el_ms", False, (0.1, 0.4)),
        ),
        Claim(
            "without UT: higher TTFT",
            "+22 % (fig. 15)",
            changes("without UT", "throttling", LONG, "mean_ttft_ms", False, (0.11, 0.44)),
        ),
        Claim(
            "without UT: higher TPOT",
            "+91 % (fig. 15)",
            changes("without UT", "throttling", LONG, "mean_tpot_ms", False, (0.45, 1.8)),
        ),
        Claim(
            "without UT: higher E2EL",
            "+38 % (fig. 15)",
            changes("without UT", "throttling", LONG, "mean_e2el_ms", False, (0.19, 0.76)),
        ),
        Claim(
            "larger T: lower TPOT",
            "TPOT better, E2EL lower (fig. 16)",
            changes("T=16", "T=1", SHORT, "mean_tpot_ms", True),
        ),
        Claim(
            "MaxP of 512 costs throughput",
            "fig. 16",
            changes("MaxP=512", "throttling", SHORT, "output_throughput", True),
        ),
        Claim(
            "MinP hardly matters",
            "at most 2 % (fig. 16)",
            little(("MinP=16", "MinP=64"), "throttling", LONG, "mean_e2el_ms", 0.02),
        ),
        Claim(
            "a threshold of 0 is slightly worse",
            "TTFT, TPOT, E2EL (fig. 16)",
            changes("threshold 0", "throttling", LONG, "mean_e2el_ms", False, (0.0, 0.1)),
        ),
        Claim(
            "faster than vLLM 0.8.1 and SGLang 0.4.3",
            "+29 to +150 % over vLLM (4.2)",
            untestable("their runtimes: what the engines themselves add is not in a policy"),
        ),
        Claim(
            "the same on 4 A800 over a network",
            "figure 13",
            untestable("the testbed's network, which the paper's public pages do not give"),
        ),
    ),
    small=("model=tiny", "device=h100", "parallel=pp4", "kv.blocks=400", "workload.max_length=512"),
    small_loads={
        SHORT: (
            "workload.requests=60",
            "workload.rate=400",
            "workload.lengths.prompt.mean=96",
            "workload.lengths.output.mean=32",
        ),
        LONG: (
            "workload.requests=40",
            "workload.rate=300",
            "workload.lengths.prompt.mean=200",
            "workload.lengths.output.mean=32",
        ),
    },
    notes=(
        "Lengths are log-normal with the means of the traces that the paper took (ShareGPT 225 + 157 tokens as its own "
        "generator filters them, Azure conversations 1,155 + 211), arrivals Poisson.",
        "Long prompts run with a KV pool of 6,000 blocks: on 4 L20 the pool of a 32B is where UT has something to do.",
    ),
)
