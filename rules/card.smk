# The checkpoint's README.md is a link to the output: no other rule than training may declare a file
# in the checkpoint.
rule card:
    input:
        shards=lambda wildcards: f"{R}/data/{data_of(wildcards)}/shards.json",
        vocab=f"{R}/vocab_{{run}}.json",
        checkpoint=f"{R}/ckpt_{{run}}",
        check=f"{R}/check_{{run}}.json",
        bench=f"{R}/bench_{{run}}.json",
    output:
        f"{R}/card_{{run}}.md",
    log:
        f"{R}/logs/card_{{run}}.jsonl",
    conda:
        ENV
    resources:
        runtime=5,
        mem_mb=SMALL_MB,
    params:
        fields=json.dumps(C.card.model_dump(), sort_keys=True),
        code=code_hash("card"),
    shell:
        """
        python "$SCRIPTS/card.py" \
            --run {wildcards.run:q} \
            --fields {params.fields:q} \
            --shards {input.shards:q} \
            --vocab {input.vocab:q} \
            --checkpoint {input.checkpoint:q} \
            --check {input.check:q} \
            --bench {input.bench:q} \
            --out {output:q} \
            --log {log:q}
        """
