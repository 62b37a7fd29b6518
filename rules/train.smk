rule train:
    input:
        hidden=hidden_of,
        vocab=f"{R}/vocab_{{run}}.safetensors",
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        init=lambda wildcards: named(init_from(wildcards.run)),
        preflight=preflight_of,
    output:
        directory(f"{R}/ckpt_{{run}}"),
    log:
        f"{R}/logs/train_{{run}}.jsonl",
    conda:
        ENV
    threads: workflow.cores
    resources:
        gpu=all_gpus,
        # By these the SLURM plugin leaves it to the job to start a process on each machine.
        nodes=of_run("train", "nodes"),
        mpi=if_several(lambda nodes: "srun"),
        tasks=if_several(lambda nodes: nodes),
        tasks_per_gpu=if_several(lambda nodes: 0),
        runtime=of_run("train", "runtime"),
        mem_mb=NEEDS.memory("train"),
        disk_mb=lambda wildcards: NEEDS.training(wildcards.run),
        checkpoint_every=of_run("train", "checkpoint_every"),
        keep=of_run("train", "keep"),
    params:
        rates=RATES,
        state=lambda wildcards: f"{R}/.state/train/{wildcards.run}",
        tensorboard=lambda wildcards: f"{R}/logs/tensorboard/{wildcards.run}",
        init=lambda wildcards, input: ["--init-from", *input.init] if input.init else [],
        init_content=lambda wildcards: named_content(init_from(wildcards.run)),
        draft_vocab_size=of_run("vocab", "draft_vocab_size"),
        layer_ids=C.extract.layer_ids,
        shape=lambda wildcards: options.draft_shape(C, wildcards.run),
        dtype=of_run("train", "dtype"),
        held_out=of_run("train", "held_out"),
        epochs=of_run("train", "epochs"),
        total_seq_len=of_run("train", "total_seq_len"),
        optimizer=of_run("train", "optimizer"),
        lr=of_run("train", "lr"),
        muon_lr=of_run("train", "muon_lr"),
        weight_decay=of_run("train", "weight_decay"),
        scheduler=of_run("train", "scheduler"),
        warmup_ratio=of_run("train", "warmup_ratio"),
        ttt_steps=of_run("train", "ttt_steps"),
        ttt_decay=of_run("train", "ttt_decay"),
        ttt_warmup_epochs=of_run("train", "ttt_warmup_epochs"),
        noise=of_run("train", "noise"),
        seed=of_run("train", "seed"),
        gradient_accumulation=of_run("train", "gradient_accumulation"),
        patience=of_run("train", "patience"),
        layout=of_run("train", "layout"),
        launch=lambda wildcards: options.launch(C.runs[wildcards.run].train),
        gpus=of_run("train", "gpus"),
        nodes=of_run("train", "nodes"),
        trust=TRUST,
        code=code_hash("train"),
    shell:
        """
        {params.launch} "$SCRIPTS/train.py" \
            --hidden {input.hidden:q} \
            --vocab {input.vocab:q} \
            --draft-vocab-size {params.draft_vocab_size} \
            --verifier {input.verifier:q} \
            --identity {input.identity:q} \
            {params.trust:q} \
            {params.init:q} \
            --state {params.state:q} \
            --out {output:q} \
            --log {log:q} \
            --rates {params.rates:q} \
            --layer-ids {params.layer_ids} \
            {params.shape:q} \
            --dtype {params.dtype} \
            --held-out {params.held_out} \
            --epochs {params.epochs} \
            --total-seq-len {params.total_seq_len} \
            --optimizer {params.optimizer} \
            --lr {params.lr} \
            --muon-lr {params.muon_lr} \
            --weight-decay {params.weight_decay} \
            --scheduler {params.scheduler} \
            --warmup-ratio {params.warmup_ratio} \
            --ttt-steps {params.ttt_steps} \
            --ttt-decay {params.ttt_decay} \
            --ttt-warmup-epochs {params.ttt_warmup_epochs} \
            --noise {params.noise} \
            --seed {params.seed} \
            --gpus {params.gpus} \
            --nodes {params.nodes} \
            --gradient-accumulation {params.gradient_accumulation} \
            --patience {params.patience} \
            --layout {params.layout} \
            --checkpoint-every {resources.checkpoint_every} \
            --keep {resources.keep} \
            --tensorboard {params.tensorboard:q}
        """
