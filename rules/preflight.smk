rule preflight:
    input:
        shards=lambda wildcards: expand(
            f"{R}/data/{data_of(wildcards)}/shards/{{shard}}.safetensors",
            shard=shard_names(data_of(wildcards)),
        ),
        verifier=f"{R}/verifier",
    output:
        f"{R}/preflight_{{run}}.json",
    log:
        f"{R}/logs/preflight_{{run}}.jsonl",
    # Before any extraction that is ready, too.
    priority: 1
    conda:
        ENV
    resources:
        runtime=10,
        # As extraction's: memory tuning changes no check's input.
        gpu_memory_percent=round(100 * C.extract.gpu_memory_utilization),
        kv_cache_gib=C.extract.kv_cache_gib,
        max_num_batched_tokens=C.extract.max_num_batched_tokens,
        states_mb=lambda wildcards: states_mb(data_of(wildcards)),
    params:
        store=f"{R}/.state/store",
        gpus=C.extract.gpus,
        dtype=C.verifier.dtype,
        max_length=C.shard.max_length,
        answers=C.shard.answers,
        max_model_len=C.bench.max_model_len,
        draft_vocab_size=of_run("vocab", "draft_vocab_size"),
        layer_ids=C.extract.layer_ids,
        shape=draft_shape,
        ttt_steps=of_run("train", "ttt_steps"),
        layout=of_run("train", "layout"),
        trust=flag("trust-remote-code", C.verifier.trust_remote_code),
        code=code_hash("preflight"),
    shell:
        """
        python "$SCRIPTS/preflight.py" \
            --shards {input.shards:q} \
            --verifier {input.verifier:q} \
            {params.trust:q} \
            --store {params.store:q} \
            --out {output:q} \
            --log {log:q} \
            --layer-ids {params.layer_ids} \
            {params.shape:q} \
            --draft-vocab-size {params.draft_vocab_size} \
            --ttt-steps {params.ttt_steps} \
            --layout {params.layout} \
            --answers {params.answers} \
            --max-length {params.max_length} \
            --states-mb {resources.states_mb} \
            --dtype {params.dtype} \
            --max-model-len {params.max_model_len} \
            --gpus {params.gpus} \
            --gpu-memory-percent {resources.gpu_memory_percent} \
            --kv-cache-gib {resources.kv_cache_gib} \
            --max-num-batched-tokens {resources.max_num_batched_tokens}
        """


# What extraction of a data set waits for: the preflights of the runs that are asked for. It is
# deleted once extraction has ended, so that a run more or less asks for no extraction.
rule preflights:
    input:
        shards=f"{R}/data/{{data}}/shards.json",
        runs=asked_for,
    output:
        temp(f"{R}/data/{{data}}/preflight.json"),
    log:
        f"{R}/logs/preflights_{{data}}.log",
    localrule: True
    conda:
        ENV
    shell:
        """
        cat {input.runs:q} /dev/null >{output:q} 2>{log:q}
        """
