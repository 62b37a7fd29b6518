# A second's work, done first, so that a run can be compared with what was expected of it. Local, as
# only there is what earlier stages measured, and a local verifier.
rule plan:
    input:
        # Where its sizes can be known from nothing else.
        [] if IS_KNOWN else f"{R}/verifier",
    output:
        f"{R}/plan_{{run}}.json",
    log:
        f"{R}/logs/plan_{{run}}.jsonl",
    priority: 100
    localrule: True
    conda:
        ENV
    resources:
        runtime=5,
        mem_mb=SMALL_MB,
    params:
        data=data_of,
        settings=C.model_dump_json(),
        code=code_hash("plan"),
    shell:
        """
        python "$SCRIPTS/plan.py" \
            --settings {params.settings:q} \
            --run {wildcards.run:q} \
            --verifier {input:q} \
            --json {output:q} \
            --log {log:q}
        """
