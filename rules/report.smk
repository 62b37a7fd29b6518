# Apart from the report, so that an edit of a template or of a text draws nothing again.
rule draw:
    input:
        checkpoint=f"{R}/ckpt_{{run}}",
        vocab=f"{R}/vocab_{{run}}.json",
        hidden=lambda wildcards: f"{R}/data/{data_of(wildcards)}/hidden.json",
        bench=f"{R}/bench_{{run}}.json",
    output:
        directory(f"{R}/report_{{run}}"),
    log:
        f"{R}/logs/draw_{{run}}.jsonl",
    wildcard_constraints:
        # The folder's name would match that of every page.
        run=r"[^/]+(?<!\.html)(?<!\.md)(?<!\.json)",
    localrule: True
    conda:
        ENV
    resources:
        runtime=5,
        mem_mb=SMALL_MB,
    params:
        code=code_hash("draw"),
    shell:
        """
        python "$SCRIPTS/draw.py" \
            --checkpoint {input.checkpoint:q} \
            --vocab {input.vocab:q} \
            --hidden {input.hidden:q} \
            --bench {input.bench:q} \
            --out {output:q} \
            --log {log:q}
        """


rule report:
    input:
        shards=lambda wildcards: f"{R}/data/{data_of(wildcards)}/shards.json",
        hidden=lambda wildcards: f"{R}/data/{data_of(wildcards)}/hidden.json",
        # As it was: a later plan makes no other report.
        plan=ancient(f"{R}/plan_{{run}}.json"),
        vocab=f"{R}/vocab_{{run}}.json",
        checkpoint=f"{R}/ckpt_{{run}}",
        check=f"{R}/check_{{run}}.json",
        bench=f"{R}/bench_{{run}}.json",
        # So that whoever has the report has the card in the checkpoint.
        card=f"{R}/card_{{run}}.md",
        measurements=f"{R}/bench_{{run}}.csv",
        figures=f"{R}/report_{{run}}",
        identities=[
            f"{R}/verifier.json",
            *expand(f"{R}/conversations/{{number}}.json", number=range(len(C.conversations))),
            f"{R}/prompts.json",
        ],
    output:
        page=f"{R}/report_{{run}}.html",
        markdown=f"{R}/report_{{run}}.md",
    log:
        f"{R}/logs/report_{{run}}.jsonl",
    wildcard_constraints:
        run=r"(?!sweep\.)[^/]+",
    localrule: True
    conda:
        ENV
    resources:
        runtime=5,
        mem_mb=SMALL_MB,
    params:
        template=provenance.template_hash("report"),
        code=code_hash("report"),
    shell:
        """
        python "$SCRIPTS/report.py" \
            --run {wildcards.run:q} \
            --template "$SCRIPTS/../templates/report.html" \
            --shards {input.shards:q} \
            --hidden {input.hidden:q} \
            --plan {input.plan:q} \
            --vocab {input.vocab:q} \
            --checkpoint {input.checkpoint:q} \
            --check {input.check:q} \
            --bench {input.bench:q} \
            --measurements {input.measurements:q} \
            --figures {input.figures:q} \
            --identities {input.identities:q} \
            --out {output.page:q} \
            --markdown {output.markdown:q} \
            --log {log:q}
        """


rule report_sweep:
    input:
        checkpoint=of_sweep(f"{R}/ckpt_{{run}}"),
        vocab=of_sweep(f"{R}/vocab_{{run}}.json"),
        check=of_sweep(f"{R}/check_{{run}}.json"),
        bench=of_sweep(f"{R}/bench_{{run}}.json"),
    output:
        page=f"{R}/report_sweep.html",
        summary=f"{R}/report_sweep.json",
    log:
        f"{R}/logs/report_sweep.jsonl",
    localrule: True
    conda:
        ENV
    resources:
        runtime=5,
        mem_mb=SMALL_MB,
    params:
        template=provenance.template_hash("sweep"),
        code=code_hash("sweep"),
    shell:
        """
        python "$SCRIPTS/sweep.py" \
            --template "$SCRIPTS/../templates/sweep.html" \
            --checkpoint {input.checkpoint:q} \
            --vocab {input.vocab:q} \
            --check {input.check:q} \
            --bench {input.bench:q} \
            --out {output.page:q} \
            --summary {output.summary:q} \
            --log {log:q}
        """
