rule bench:
    input:
        hidden=hidden_of,
        checkpoint=f"{R}/ckpt_{{run}}",
        check=f"{R}/check_{{run}}.json",
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        prompts=f"{R}/prompts",
        more=lambda wildcards: named(bench_of(wildcards.run)),
    output:
        summary=f"{R}/bench_{{run}}.json",
        rows=f"{R}/bench_{{run}}.jsonl",
        measurements=f"{R}/bench_{{run}}.csv",
    log:
        f"{R}/logs/bench_{{run}}.jsonl",
    conda:
        ENV
    threads: workflow.cores
    resources:
        gpu=of_run("bench", "gpus"),
        runtime=of_run("bench", "runtime"),
        mem_mb=NEEDS.memory("bench"),
    params:
        rates=RATES,
        state=f"{R}/.state/bench/{{run}}",
        more=lambda wildcards: named_content(bench_of(wildcards.run)),
        prompts_name=C.prompts.name,
        held_out=of_run("train", "held_out"),
        methods=of_run("bench", "methods"),
        epochs=of_run("bench", "epochs"),
        drafts=pairs("drafts"),
        prompt_files=pairs("prompt_files"),
        prompts=of_run("bench", "prompts"),
        prompts_elsewhere=of_run("bench", "prompts_elsewhere"),
        turns=of_run("bench", "turns"),
        num_held_out=of_run("bench", "held_out_prompts"),
        held_out_tokens=lambda wildcards: held_out_tokens(C, C.runs[wildcards.run].bench),
        held_out_methods=of_run("bench", "held_out_methods"),
        # As the training data's.
        system_turns=C.shard.system_turns,
        date=str(C.shard.date),
        template_options=json.dumps(C.shard.template_options, sort_keys=True),
        max_new_tokens=of_run("bench", "max_new_tokens"),
        draft_tokens=of_run("bench", "draft_tokens"),
        concurrency=of_run("bench", "concurrency"),
        every_pair=bench_flag("every_pair"),
        repeats=of_run("bench", "repeats"),
        # GPUs hold one engine at a time.
        interleave=lambda wildcards: options.flag(
            "interleave",
            C.runs[wildcards.run].bench.interleave and not C.runs[wildcards.run].bench.gpus,
        ),
        samples=of_run("bench", "samples"),
        profile=bench_flag("profile"),
        draft_gpus=lambda wildcards: C.runs[wildcards.run].bench.draft_gpus or 0,
        compile=bench_flag("compile"),
        dtype=C.verifier.dtype,
        trust=TRUST,
        # Here the engine's settings decide the figures, so a change of one measures again.
        gpu_memory_percent=lambda wildcards: round(
            100 * C.runs[wildcards.run].bench.gpu_memory_utilization
        ),
        kv_cache_gib=of_run("bench", "kv_cache_gib"),
        max_model_len=of_run("bench", "max_model_len"),
        max_num_seqs=of_run("bench", "max_num_seqs"),
        max_num_batched_tokens=of_run("bench", "max_num_batched_tokens"),
        code=code_hash("bench"),
    shell:
        """
        python "$SCRIPTS/bench.py" \
            --run {wildcards.run:q} \
            --checkpoint {input.checkpoint:q} \
            --epochs {params.epochs} \
            --draft {params.drafts:q} \
            --methods {params.methods} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            --prompts {input.prompts:q} \
            --prompts-name {params.prompts_name:q} \
            --prompt-file {params.prompt_files:q} \
            --num-prompts {params.prompts} \
            --prompts-elsewhere {params.prompts_elsewhere} \
            --turns {params.turns} \
            --hidden {input.hidden:q} \
            --held-out {params.held_out} \
            --num-held-out {params.num_held_out} \
            --held-out-tokens {params.held_out_tokens} \
            --held-out-methods {params.held_out_methods} \
            --system-turns {params.system_turns} \
            --date {params.date:q} \
            --template-options {params.template_options:q} \
            --max-new-tokens {params.max_new_tokens} \
            --draft-tokens {params.draft_tokens} \
            --concurrency {params.concurrency} \
            {params.every_pair:q} \
            --repeats {params.repeats} \
            {params.interleave:q} \
            --samples {params.samples} \
            {params.profile:q} \
            --draft-gpus {params.draft_gpus} \
            {params.compile:q} \
            --dtype {params.dtype} \
            --gpus {resources.gpu} \
            --gpu-memory-percent {params.gpu_memory_percent} \
            --kv-cache-gib {params.kv_cache_gib} \
            --max-model-len {params.max_model_len} \
            --max-num-seqs {params.max_num_seqs} \
            --max-num-batched-tokens {params.max_num_batched_tokens} \
            --state {params.state:q} \
            --summary {output.summary:q} \
            --rows {output.rows:q} \
            --measurements {output.measurements:q} \
            --log {log:q} \
            --rates {params.rates:q}
        """


# Not part of a report: asked for by name.
rule serve:
    input:
        checkpoint=f"{R}/ckpt_{{run}}",
        verifier=f"{R}/verifier",
        bench=f"{R}/bench_{{run}}.json",
        rows=f"{R}/bench_{{run}}.jsonl",
    output:
        f"{R}/serve_{{run}}.json",
    log:
        f"{R}/logs/serve_{{run}}.txt",
    conda:
        ENV
    threads: workflow.cores
    resources:
        gpu=of_run("bench", "gpus"),
        runtime=of_run("bench", "runtime"),
        mem_mb=NEEDS.memory("bench"),
    params:
        trust=TRUST,
        gpu_memory_percent=lambda wildcards: round(
            100 * C.runs[wildcards.run].bench.gpu_memory_utilization
        ),
        kv_cache_gib=of_run("bench", "kv_cache_gib"),
        max_model_len=of_run("bench", "max_model_len"),
        max_num_seqs=of_run("bench", "max_num_seqs"),
        max_num_batched_tokens=of_run("bench", "max_num_batched_tokens"),
        code=code_hash("serve"),
    shell:
        """
        python "$SCRIPTS/serve.py" \
            --checkpoint {input.checkpoint:q} \
            --verifier {input.verifier:q} \
            {params.trust:q} \
            --bench {input.bench:q} \
            --rows {input.rows:q} \
            --gpus {resources.gpu} \
            --gpu-memory-percent {params.gpu_memory_percent} \
            --kv-cache-gib {params.kv_cache_gib} \
            --max-model-len {params.max_model_len} \
            --max-num-seqs {params.max_num_seqs} \
            --max-num-batched-tokens {params.max_num_batched_tokens} \
            --summary {output:q} \
            --log {log:q}
        """
