def template_hash(name):
    """A page's template and what it shares with the others, by content: as inputs, their paths
    would change with the checkout's place."""
    return [sha256_file(SCRIPTS.parent / f"templates/{file}.html") for file in (name, "page")]


rule report:
    input:
        shards=lambda wildcards: f"{R}/data/{data_of(wildcards)}/shards.json",
        hidden=lambda wildcards: f"{R}/data/{data_of(wildcards)}/hidden.json",
        vocab=f"{R}/vocab_{{run}}.json",
        checkpoint=f"{R}/ckpt_{{run}}",
        check=f"{R}/check_{{run}}.json",
        bench=f"{R}/bench_{{run}}.json",
        measurements=f"{R}/bench_{{run}}.csv",
        identities=[
            f"{R}/verifier.json",
            *expand(f"{R}/conversations/{{number}}.json", number=range(len(C.conversations))),
            f"{R}/prompts.json",
        ],
    output:
        f"{R}/report_{{run}}.html",
    log:
        f"{R}/logs/report_{{run}}.jsonl",
    conda:
        ENV
    resources:
        runtime=5,
    params:
        template=template_hash("report"),
        code=code_hash("report"),
    shell:
        """
        python "$SCRIPTS/report.py" \
            --run {wildcards.run:q} \
            --template "$SCRIPTS/../templates/report.html" \
            --shards {input.shards:q} \
            --hidden {input.hidden:q} \
            --vocab {input.vocab:q} \
            --checkpoint {input.checkpoint:q} \
            --check {input.check:q} \
            --bench {input.bench:q} \
            --measurements {input.measurements:q} \
            --identities {input.identities:q} \
            --out {output:q} \
            --log {log:q}
        """
