"""What a benchmark measures, and in which order."""

# The set of prompts that is the run's own.
HELD_OUT = "held-out conversations"


def passes(args, sets: dict[str, list]) -> list[dict]:
    """What is measured: {set, draft_tokens, concurrency, prompts, kinds}, the main setting first.

    The baseline drafts nothing, so it is measured once at each concurrency.
    """
    main_tokens, main = args.draft_tokens[0], args.concurrency[0]
    untrained, drafts = ["ngram", "suffix"], ["eagle3"]
    first = next(iter(sets))
    result = [
        {"set": name, "prompts": len(of), "draft_tokens": main_tokens, "concurrency": main}
        | {"kinds": ["baseline", *untrained, *drafts]}
        for name, of in sets.items()
        if name != HELD_OUT
    ]
    for concurrency in args.concurrency:
        # At least as many requests as are to be under way at once.
        turns = 1 + max(len(prompt["later"]) for prompt in sets[first])
        few = max(args.prompts_elsewhere, -(-concurrency // turns))
        for draft_tokens in args.draft_tokens:
            away = (draft_tokens != main_tokens) + (concurrency != main)
            if away == 1 or (away and args.every_pair):
                kinds = [*untrained, *drafts]
                result.append(
                    {"set": first, "prompts": min(few, len(sets[first]))}
                    | {"draft_tokens": draft_tokens, "concurrency": concurrency}
                    | {"kinds": kinds if draft_tokens != main_tokens else ["baseline", *kinds]}
                )
    if sets[HELD_OUT]:
        every = ["baseline", *untrained] if args.held_out_methods == "all" else []
        result.append(
            {"set": HELD_OUT, "prompts": len(sets[HELD_OUT]), "draft_tokens": main_tokens}
            | {"concurrency": args.max_num_seqs, "kinds": [*every, *drafts]}
        )
    return result


def plan(args, sets: dict[str, list], methods: list[dict]) -> list[dict]:
    """Groups of requests to be served together, in order: a pass with `method`, `repeat`, `group`
    and `asked`, the (place of the prompt, turn) of each request. Methods take turns in each group,
    another one first each time, or, without --interleave, one after the other."""
    items = []
    for repeat in range(args.repeats):
        for number, one in enumerate(passes(args, sets)):
            prompts = sets[one["set"]][: one["prompts"]]
            asked = [
                [(place, turn) for place, p in enumerate(prompts) if turn < 1 + len(p["later"])]
                for turn in range(args.turns)
            ]
            # Once the main setting is measured, all turns are known.
            if one["concurrency"] > 1 and number:
                asked = [[request for of_turn in asked for request in of_turn]]
            group = 0
            for of_turn in asked:
                size = 1 if one["concurrency"] == 1 else max(len(of_turn), 1)
                for start in range(0, len(of_turn), size):
                    serving = [m for m in methods if m["kind"] in one["kinds"]]
                    first = group % len(serving)
                    for method in serving[first:] + serving[:first]:
                        items.append(
                            one
                            | {"method": method, "repeat": repeat, "group": group}
                            | {"asked": of_turn[start : start + size]}
                        )
                    group += 1
    if not args.interleave:
        # A stable sort; the baseline's answers come first.
        items.sort(key=lambda item: (item["repeat"], methods.index(item["method"])))
    return items


def key_of(item: dict) -> list:
    return [
        item["set"],
        item["method"]["name"],
        item["draft_tokens"],
        item["concurrency"],
        item["repeat"],
        item["group"],
    ]
