"""Made-up records as the benchmarks write them, for what reads them."""

WHERE = {
    "device": "NVIDIA H200",
    "jax": "0.0.1",
    "jaxlib": "0.0.1",
    "commit": "abc",
    "date": "2026-01-02",
}


def decode_records():
    records = []
    sizes = {"none": 0, "identical": 1, "uniform": 6, "skewed": 8, "distinct": 32}
    for shape in ("7B", "8B"):
        for context in (512, "512..640"):
            for rows in (1, 32):
                for popularity, adapters in sizes.items():
                    adapters = min(adapters, rows)
                    if rows == 1 and popularity not in ("none", "identical"):
                        continue
                    methods = ["ours", "gather", "group_swap"]
                    for i, method in enumerate(methods if adapters else ["backbone"]):
                        step_ms = 5.0 + rows / 16 + adapters / 32 + 10 * i
                        records.append(
                            {
                                "benchmark": "decode",
                                "shape": shape,
                                "rows": rows,
                                "popularity": popularity,
                                "adapters": adapters,
                                "ranks": [16] if adapters else [],
                                "context": context,
                                "method": method,
                                "step_ms": step_ms,
                                "backbone_ms": 5.0 + rows / 16,
                                "floor_ms": 4.0 + rows / 16,
                                "tokens_per_s": rows / step_ms * 1e3,
                                **WHERE,
                            }
                        )
    low = {"popularity": "distinct", "method": "ours", "ranks": [8], "step_ms": 8.1}
    mixed = {"ranks": [8, 16, 64], "least_rank_ms": 8.0}
    mixed |= {"rank_allowed_ms": 8.76, "rank_met": True}
    others = {**records[0], "rows": 32, "adapters": 32, **low}
    return [*records, others, {**others, **mixed, "step_ms": 8.5}]


def sgmv_records():
    return [
        {
            "benchmark": "sgmv",
            "cell": f"{popularity} {rows} {d_in}",
            "suite": "decode",
            "d_in": d_in,
            "d_outs": [4096],
            "rank": 16,
            "rows": rows,
            "popularity": popularity,
            "bytes": 10**6 * rows,
            "flops": 10**7 * rows,
            "ours_us": 6.0,
            "peer_us": 8.0,
            "in_turn": True,
            "gather_us": 3.0 if rows == 1 else 12.0,
            "loop_us": 12.0,
            **WHERE,
        }
        for popularity in ("distinct", "identical")
        for rows, d_in in ((1, 4096), (64, 4096), (64, 11008))
    ]


def adapters_records():
    steps = [
        {"benchmark": "adapters_step", "shape": "7B", "rows": 32, "adapters": n}
        | {"step_ms": 6.0 + n / 1000, "backbone_ms": 6.0, **WHERE}
        for n in (0, 1, 32, 1000)
    ]
    products = [
        {"benchmark": "adapters_op", "rows": 32, "adapters": n, "method": method}
        | {"us": 5.0, **WHERE}
        for n in (1, 32, 1000)
        for method in ("segments", "gather")
    ]
    return steps + products


def order_records():
    return [
        {"benchmark": "order", "rows": 64, "popularity": popularity, "order": order}
        | {"method": method, "us": 5.0, **WHERE}
        for popularity in ("uniform", "distinct")
        for order in ("sorted", "shuffled", "interleaved")
        for method in ("segments", "per_row", "gather")
    ]


def ceiling_records():
    figures = {"bytes_per_s": 4.0e12, "flops_per_s": 7.8e14}
    return [{"benchmark": "ceilings", **figures, **WHERE}]


def around_records():
    launch = {"benchmark": "dispatch", "layers": 32, "rows": 32, **WHERE}
    launches = [{**launch, "launch_ms": ms} for ms in (0.9, 1.25)]
    times = {"draw": 196.0, "min_p": 300.0, "logprobs": 70.0}
    return launches + [
        {"benchmark": "sampling", "case": case, "rows": rows, "vocab": 32000}
        | {"us": us, **WHERE, "commit": "def"}
        for rows in (32, 1, 5)
        for case, us in times.items()
    ]


def where_records():
    about = {"benchmark": "where", "shape": "7B", "rows": 32, "context": 512}
    cases = {"distinct": "ours", "none": "backbone"}
    # In the order of time: a profile before, one between, and the last one.
    times = {"abc": (30.0, 5000.0), "mid": (1.0, 1.0), "def": (20.0, 4000.0)}
    return [
        {**about, "popularity": popularity, "method": method, "group": group}
        | {"us": us, "step_us": 6800.0 - gaps_us, **WHERE, "commit": commit}
        | {"from_second_step": popularity != "none"}
        for popularity, method in cases.items()
        for commit, (gaps_us, products_us) in times.items()
        if popularity != "none" or commit == "abc"
        for group, us in (
            ("gaps", gaps_us),
            ("shrink", 0.0),
            ("norms", 110.0),
            ("base products", products_us),
        )
    ]


def serving_records():
    """Return one run at 7B, its group and swap missing."""
    about = {"shape": "7B", "seats": 32, "max_len": 2048, **WHERE}
    steps = {"tokens_per_s": 3200.4, "decode_ms": 8.256, "roofline": 0.7512}
    steps |= {"busy": 0.957, "seconds": 20.0}
    sent = {"rows": 32, "prompt_len": 512, "num_new": 128, "all_first_ms": 420.6}
    vllm = {"vllm_tokens_per_s": 1342, "vllm_all_first_ms": 572}
    decode = {"median_ms": 8.0, "slowest_ms": 10.0, "slowest_over_median": 1.25}
    first = {"num_warm": 90, "warm_p50_ms": 20.4, "warm_p99_ms": 51.0}
    none = {"num_cold": 0, "cold_p50_ms": None, "cold_p99_ms": None}
    some = {"num_cold": 40, "cold_p50_ms": 60.0, "cold_p99_ms": 99.0}
    churn = {"adapters": 1000, "slots": 32, **steps, **first}
    records = [
        *(
            {"benchmark": "trace", "popularity": name, "method": method}
            | {"whole": whole, **steps}
            for whole in (True, False)
            for name, method in (("distinct", "mixed"), ("none", "backbone"))
        ),
        {"benchmark": "batch", "popularity": "distinct", **sent, **steps, **vllm},
        {"benchmark": "batch", "popularity": "none", **sent, **steps, "runs": 3},
        *(
            {"benchmark": "cold", "tier": tier, "beside": beside, "ms": ms}
            | {"slowest_load_ms": 2 * ms, **(decode if beside else {})}
            for beside in (31, 0)
            for tier, ms in (("disk", 20.0), ("host", 2.5))
        ),
        {"benchmark": "copy", "adapter_bytes": 80 * 10**6, "stage_ms": 4.0}
        | {"begin_ms": 0.5, "copy_ms": 2.0},
        {"benchmark": "churn", "law": "zipf", "method": "loaded", **churn, **some},
        {"benchmark": "churn", "law": "zipf", "method": "all_there", **churn, **none},
        {"benchmark": "goal", "goal": "distinct: device busy", "wanted": ">= 0.95"}
        | {"measured": 0.957, "met": True},
        {"benchmark": "goal", "goal": "tokens/s", "wanted": ">= 3221"}
        | {"measured": 3200.4, "met": False},
    ]
    return [
        {**about, **record, "benchmark": f"serving_{record['benchmark']}"}
        for record in records
    ]


def cluster_records():
    """Return one run of two engines."""
    about = {"shape": "7B", "layers": None, "seats": 32, **WHERE}
    steps = ((2, 5.2, 12300.4), (1, 5.4, 5900.0))
    scaling = [
        {"benchmark": "cluster_scaling", "engines": engines, "step_ms": step_ms}
        | {"tokens_per_s": tokens_per_s}
        for engines, step_ms, tokens_per_s in steps
    ]
    times = {"median_ms": 366.4, "slowest_ms": 603.4, "usual_ms": 5.71}
    move = {"benchmark": "cluster_move", "requests": 32, "tokens": 224, **times}
    return [{**about, **record} for record in (*scaling, move)]
