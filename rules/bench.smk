rule bench:
    input:
        hidden=hidden_of,
        checkpoint=f"{R}/ckpt_{{run}}",
        check=f"{R}/check_{{run}}.json",
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        prompts=f"{R}/prompts",
    output:
        summary=f"{R}/bench_{{run}}.json",
        measurements=f"{R}/bench_{{run}}.csv",
    log:
        f"{R}/logs/bench_{{run}}.jsonl",
    conda:
        ENV
    threads: workflow.cores
    resources:
        gpu=C.bench.gpus,
        runtime=C.bench.runtime,
        mem_mb=memory_mb("bench"),
    params:
        rates=RATES,
        prompts_name=C.prompts.name,
        prompts=lambda wildcards: C.runs[wildcards.run].prompts or C.bench.prompts,
        held_out=of_run("train", "held_out"),
        num_held_out=C.bench.held_out_prompts,
        # As the training data's.
        system_turns=C.shard.system_turns,
        date=str(C.shard.date),
        template_options=json.dumps(C.shard.template_options, sort_keys=True),
        max_new_tokens=C.bench.max_new_tokens,
        draft_tokens=C.bench.draft_tokens,
        dtype=C.verifier.dtype,
        trust=flag("trust-remote-code", C.verifier.trust_remote_code),
        # Here the engine's settings decide the figures, so a change of one measures again.
        gpu_memory_percent=round(100 * C.bench.gpu_memory_utilization),
        kv_cache_gib=C.bench.kv_cache_gib,
        max_model_len=C.bench.max_model_len,
        max_num_seqs=C.bench.max_num_seqs,
        max_num_batched_tokens=C.bench.max_num_batched_tokens,
        code=code_hash("bench"),
    shell:
        """
        python "$SCRIPTS/bench.py" \
            --run {wildcards.run:q} \
            --checkpoint {input.checkpoint:q} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            --prompts {input.prompts:q} \
            --prompts-name {params.prompts_name:q} \
            --num-prompts {params.prompts} \
            --hidden {input.hidden:q} \
            --held-out {params.held_out} \
            --num-held-out {params.num_held_out} \
            --system-turns {params.system_turns} \
            --date {params.date:q} \
            --template-options {params.template_options:q} \
            --max-new-tokens {params.max_new_tokens} \
            --draft-tokens {params.draft_tokens} \
            --dtype {params.dtype} \
            --gpus {resources.gpu} \
            --gpu-memory-percent {params.gpu_memory_percent} \
            --kv-cache-gib {params.kv_cache_gib} \
            --max-model-len {params.max_model_len} \
            --max-num-seqs {params.max_num_seqs} \
            --max-num-batched-tokens {params.max_num_batched_tokens} \
            --summary {output.summary:q} \
            --measurements {output.measurements:q} \
            --log {log:q} \
            --rates {params.rates:q}
        """
