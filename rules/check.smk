rule check:
    input:
        checkpoint=f"{R}/ckpt_{{run}}",
        verifier=f"{R}/verifier",
    output:
        f"{R}/check_{{run}}.json",
    log:
        f"{R}/logs/check_{{run}}.jsonl",
    conda:
        ENV
    resources:
        runtime=20,
        mem_mb=NEEDS.memory("check"),
    params:
        layout=of_run("train", "layout"),
        max_model_len=C.bench.max_model_len,
        trust=TRUST,
        code=code_hash("check"),
    shell:
        """
        python "$SCRIPTS/check.py" {input.checkpoint:q} \
            --verifier {input.verifier:q} \
            {params.trust:q} \
            --layout {params.layout} \
            --max-model-len {params.max_model_len} \
            --json {output:q} \
            --log {log:q}
        """
