# One rule a data set, or one for each of its nodes: the engine is loaded once, for whatever shards
# the store lacks.
for data in C.data:
    for name, shards, folder, after in extractions(data):

        rule:
            name:
                f"extract_{name}"
            input:
                shards=token_shards(data, shards),
                verifier=f"{R}/verifier",
                identity=f"{R}/verifier.json",
                after=after,
            output:
                hidden=expand(f"{folder}/hidden/{{shard}}.safetensors", shard=shards),
                summary=f"{folder}/hidden.json",
            log:
                f"{R}/logs/extract_{name}.jsonl",
            conda:
                ENV
            threads: workflow.cores
            resources:
                gpu=C.extract.gpus,
                # What links has no state to write.
                disk_mb=NEEDS.extraction(data, len(shards) if len(after) == 1 else 0),
                mem_mb=NEEDS.memory("extract"),
                runtime=C.extract.runtime,
                # Memory tuning changes no state, and a resource reruns nothing. A retry takes half.
                gpu_memory_percent=round(100 * C.extract.gpu_memory_utilization),
                # As text: of a number Snakemake keeps the whole part.
                cache=f"--kv-cache-gib={C.extract.kv_cache_gib}",
                max_num_seqs=halved(C.extract.max_num_seqs),
                max_num_batched_tokens=halved(C.extract.max_num_batched_tokens),
            params:
                store=f"{R}/.state/store",
                rates=RATES,
                layer_ids=C.extract.layer_ids,
                states=C.extract.states,
                answers=C.shard.answers,
                max_new_tokens=C.shard.max_new_tokens,
                max_length=C.shard.max_length,
                temperature=C.shard.temperature,
                top_p=C.shard.top_p,
                seed=C.shard.seed,
                max_model_len=C.extract.max_model_len,
                dtype=C.verifier.dtype,
                trust=TRUST,
                code=code_hash("extract"),
            shell:
                """
                python "$SCRIPTS/extract.py" \
                    --shards {input.shards:q} \
                    --out {output.hidden:q} \
                    --store {params.store:q} \
                    --verifier {input.verifier:q} \
                    --identity {input.identity:q} \
                    {params.trust:q} \
                    --summary {output.summary:q} \
                    --log {log:q} \
                    --rates {params.rates:q} \
                    --layer-ids {params.layer_ids} \
                    --states {params.states} \
                    --answers {params.answers} \
                    --max-new-tokens {params.max_new_tokens} \
                    --max-length {params.max_length} \
                    --temperature {params.temperature} \
                    --top-p {params.top_p} \
                    --seed {params.seed} \
                    --dtype {params.dtype} \
                    --max-model-len {params.max_model_len} \
                    --gpus {resources.gpu} \
                    --gpu-memory-percent {resources.gpu_memory_percent} \
                    {resources.cache} \
                    --max-num-seqs {resources.max_num_seqs} \
                    --max-num-batched-tokens {resources.max_num_batched_tokens}
                """
