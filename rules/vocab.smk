rule vocab:
    input:
        hidden=hidden_of,
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        prompts=f"{R}/prompts",
    output:
        map=f"{R}/vocab_{{run}}.safetensors",
        summary=f"{R}/vocab_{{run}}.json",
    log:
        f"{R}/logs/vocab_{{run}}.jsonl",
    conda:
        ENV
    resources:
        runtime=20,
        mem_mb=SMALL_MB,
    params:
        size=of_run("vocab", "draft_vocab_size"),
        min_coverage=of_run("vocab", "min_coverage"),
        held_out=of_run("train", "held_out"),
        trust=TRUST,
        code=code_hash("vocab"),
    shell:
        """
        python "$SCRIPTS/vocab.py" \
            --hidden {input.hidden:q} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            --prompts {input.prompts:q} \
            --size {params.size} \
            --min-coverage {params.min_coverage} \
            --held-out {params.held_out} \
            --out {output.map:q} \
            --summary {output.summary:q} \
            --log {log:q}
        """
