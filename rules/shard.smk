# One rule a data set: it writes all of the set's shards, whose number the config decides.
for data in C.data:

    rule:
        name:
            f"shard_{data}"
        input:
            conversations=expand(
                f"{R}/conversations/{{number}}", number=range(len(C.conversations))
            ),
            prompts=[f"{R}/prompts", *named(prompt_files())],
            verifier=f"{R}/verifier",
        output:
            shards=token_shards(data),
            account=f"{R}/data/{data}/shards.json",
            rejects=f"{R}/data/{data}/rejects.jsonl",
        log:
            f"{R}/logs/shard_{data}.jsonl",
        conda:
            ENV
        threads: min(workflow.cores, 8)
        resources:
            runtime=30,
            mem_mb=SMALL_MB,
        params:
            more=named_content(prompt_files()),
            folder=subpath(output.account, parent=True),
            sources=[source.source for source in C.conversations],
            limit=C.data[data].conversations,
            shard_size=C.shard.shard_size,
            max_length=C.shard.max_length,
            max_new_tokens=C.shard.max_new_tokens,
            max_turns=C.shard.max_turns,
            min_supervised_tokens=C.shard.min_supervised_tokens,
            answers=C.shard.answers,
            on_bad_file=C.shard.on_bad_file,
            max_reject_fraction=C.shard.max_reject_fraction,
            system_turns=C.shard.system_turns,
            date=str(C.shard.date),
            template_options=json.dumps(C.shard.template_options, sort_keys=True),
            trust=TRUST,
            code=code_hash("shard"),
        shell:
            """
            python "$SCRIPTS/shard.py" \
                --conversations {input.conversations:q} \
                --source-name {params.sources:q} \
                --tokenizer {input.verifier:q} \
                {params.trust:q} \
                --benchmark {input.prompts:q} \
                --out {params.folder:q} \
                --limit {params.limit} \
                --shard-size {params.shard_size} \
                --max-length {params.max_length} \
                --max-new-tokens {params.max_new_tokens} \
                --max-turns {params.max_turns} \
                --min-supervised-tokens {params.min_supervised_tokens} \
                --answers {params.answers} \
                --on-bad-file {params.on_bad_file} \
                --max-reject-fraction {params.max_reject_fraction} \
                --system-turns {params.system_turns} \
                --date {params.date:q} \
                --template-options {params.template_options:q} \
                --processes {threads} \
                --log {log:q}
            """
