"""What a benchmark measures, and in which order."""

# The set of prompts that is the run's own.
HELD_OUT = "held-out conversations"


def passes(args, sets: dict[str, list]) -> list[dict]:
    """What is measured: {set, concurrency, prompts, kinds, draft_tokens, few, repeats}, the main
    setting first. Of `draft_tokens` the first is for all prompts, the others for the first `few` of
    them. Held-out conversations, served for what is accepted, are not repeated: at temperature 0
    that is the same each time.
    """
    every = ["baseline", "ngram", "suffix", "eagle3"]
    main_tokens, main = args.draft_tokens[:1], args.concurrency[0]
    first = next(iter(sets))

    def few(concurrency: int) -> int:
        # At least as many requests as are to be under way at once.
        turns = 1 + max(len(prompt["later"]) for prompt in sets[first])
        return min(max(args.prompts_elsewhere, -(-concurrency // turns)), len(sets[first]))

    result = [
        {"set": name, "concurrency": main, "prompts": len(of), "kinds": every, "few": few(main)}
        | {"draft_tokens": args.draft_tokens if name == first else main_tokens}
        for name, of in sets.items()
        if name != HELD_OUT
    ]
    for concurrency in args.concurrency[1:]:
        count = few(concurrency)
        result.append(
            {"set": first, "concurrency": concurrency, "prompts": count, "kinds": every}
            | {"draft_tokens": args.draft_tokens if args.every_pair else main_tokens, "few": count}
        )
    if sets[HELD_OUT]:
        count = len(sets[HELD_OUT])
        kinds = every if args.held_out_methods == "all" else ["eagle3"]
        result.append(
            {"set": HELD_OUT, "concurrency": args.max_num_seqs, "prompts": count, "kinds": kinds}
            | {"draft_tokens": main_tokens, "few": count, "repeats": 1}
        )
    return [{"repeats": args.repeats} | one for one in result]


def plan(args, sets: dict[str, list], methods: list[dict]) -> list[dict]:
    """Groups of requests to be served together, in order: {set, concurrency, draft_tokens, method,
    repeat, group} and `asked`, the (place of the prompt, turn) of each request.

    In each group the methods take turns with every number of draft tokens, another one first each
    time, so that what is compared was measured in the same minute; the baseline drafts nothing and
    serves once. Without --interleave one comes after the other.
    """
    items = []
    for repeat in range(args.repeats):
        for number, one in enumerate(passes(args, sets)):
            if repeat >= one["repeats"]:
                continue
            prompts = sets[one["set"]][: one["prompts"]]
            asked = [
                [(place, turn) for place, p in enumerate(prompts) if turn < 1 + len(p["later"])]
                for turn in range(args.turns)
            ]
            # Once the main setting is measured, all turns are known.
            if one["concurrency"] > 1 and number:
                asked = [[request for of_turn in asked for request in of_turn]]
            group = 0
            serving = [m for m in methods if m["kind"] in one["kinds"]]
            for of_turn in asked:
                size = 1 if one["concurrency"] == 1 else max(len(of_turn), 1)
                for start in range(0, len(of_turn), size):
                    requests = of_turn[start : start + size]
                    tokens = (
                        one["draft_tokens"]
                        if requests[0][0] < one["few"]
                        else [one["draft_tokens"][0]]
                    )
                    turns = [
                        (method, count)
                        for place, count in enumerate(tokens)
                        for method in serving
                        if not place or method["kind"] != "baseline"
                    ]
                    first = (group + repeat) % len(turns)
                    for method, count in turns[first:] + turns[:first]:
                        items.append(
                            {"set": one["set"], "concurrency": one["concurrency"]}
                            | {"draft_tokens": count, "method": method}
                            | {"repeat": repeat, "group": group, "asked": requests}
                        )
                    group += 1
    if not args.interleave:
        # A stable sort; the baseline's answers come first, and each engine is loaded once.
        items.sort(
            key=lambda item: (
                item["repeat"],
                methods.index(item["method"]),
                args.draft_tokens.index(item["draft_tokens"]),
            )
        )
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
