# Both rules look at drafts with the same script, which does not look twice at the same: what passed
# lies in .state under a digest of all that decides it.


# A run's own. Training has it as input, so it runs again only where training would: neither an edit
# of the checks nor memory tuning nor the benchmark's size is a parameter.
rule preflight:
    input:
        shards=lambda wildcards: token_shards(data_of(wildcards)),
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        prompts=f"{R}/prompts",
        more=named(prompt_files()),
    output:
        f"{R}/preflight_{{run}}.json",
    log:
        f"{R}/logs/preflight_{{run}}.jsonl",
    conda:
        ENV
    resources:
        runtime=10,
        mem_mb=NEEDS.memory("check"),
        engine=options.preflight_engine(C),
        states_mb=lambda wildcards: NEEDS.states(data_of(wildcards)),
        prompts=lambda wildcards: options.prompts_asked(C, [wildcards.run]),
    params:
        more=named_content(prompt_files()),
        state=f"{R}/.state",
        drafts=lambda wildcards: options.drafts(C, [wildcards.run]),
        layer_ids=C.extract.layer_ids,
        max_length=C.shard.max_length,
        answers=C.shard.answers,
        trust=TRUST,
    shell:
        """
        python "$SCRIPTS/preflight.py" \
            --drafts {params.drafts:q} \
            --shards {input.shards:q} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            --state {params.state:q} \
            --layer-ids {params.layer_ids} \
            --answers {params.answers} \
            --max-length {params.max_length} \
            --states-mb {resources.states_mb} \
            --prompts {resources.prompts:q} \
            {resources.engine} \
            --out {output:q} \
            --log {log:q}
        """


# What extraction waits for, whatever makes it run: the drafts of its data set that are asked for.
# They are a resource and the file is deleted afterwards: as inputs or parameters, a run more or a
# draft's other keys would extract again, and train every run of the data set.
rule preflights:
    input:
        shards=shards_that_fit,
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        prompts=f"{R}/prompts",
        more=named(prompt_files()),
    output:
        temp(f"{R}/data/{{data}}/preflights.json"),
    log:
        f"{R}/logs/preflights_{{data}}.jsonl",
    conda:
        ENV
    resources:
        runtime=10,
        mem_mb=NEEDS.memory("check"),
        engine=options.preflight_engine(C),
        states_mb=lambda wildcards: NEEDS.states(wildcards.data),
        drafts=lambda wildcards: options.drafts(C, asked_for(wildcards.data)),
        prompts=lambda wildcards: options.prompts_asked(C, asked_for(wildcards.data)),
    params:
        state=f"{R}/.state",
        layer_ids=C.extract.layer_ids,
        max_length=C.shard.max_length,
        answers=C.shard.answers,
        trust=TRUST,
    shell:
        """
        python "$SCRIPTS/preflight.py" \
            --drafts {resources.drafts:q} \
            --shards {input.shards:q} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            --state {params.state:q} \
            --layer-ids {params.layer_ids} \
            --answers {params.answers} \
            --max-length {params.max_length} \
            --states-mb {resources.states_mb} \
            --prompts {resources.prompts:q} \
            {resources.engine} \
            --out {output:q} \
            --log {log:q}
        """
