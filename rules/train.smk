rule train:
    input:
        hidden=hidden_of,
        vocab=f"{R}/vocab_{{run}}.safetensors",
        verifier=f"{R}/verifier",
        identity=f"{R}/verifier.json",
        init=[C.train.init_from] if C.train.init_from else [],
    output:
        directory(f"{R}/ckpt_{{run}}"),
    log:
        f"{R}/logs/train_{{run}}.jsonl",
    conda:
        ENV
    threads: workflow.cores
    resources:
        gpu=C.train.gpus,
        runtime=C.train.runtime,
        checkpoint_every=C.train.checkpoint_every,
    params:
        state=lambda wildcards: f"{R}/.state/train/{wildcards.run}",
        init=lambda wildcards, input: ["--init-from", *input.init] if input.init else [],
        draft_vocab_size=C.vocab.draft_vocab_size,
        layer_ids=C.extract.layer_ids,
        num_hidden_layers=C.draft.num_hidden_layers,
        num_attention_heads=C.draft.num_attention_heads,
        num_key_value_heads=C.draft.num_key_value_heads,
        head_dim=C.draft.head_dim,
        intermediate_size=C.draft.intermediate_size,
        rope_theta=C.draft.rope_theta,
        rope_scaling=json.dumps(C.draft.rope_scaling, sort_keys=True),
        max_position_embeddings=C.draft.max_position_embeddings,
        rms_norm_eps=C.draft.rms_norm_eps,
        sliding_window=json.dumps(C.draft.sliding_window),
        norms=C.draft.norms,
        norm_before_residual=flag("norm-before-residual", C.draft.norm_before_residual),
        dtype=C.train.dtype,
        held_out=C.train.held_out,
        epochs=C.train.epochs,
        total_seq_len=C.train.total_seq_len,
        optimizer=C.train.optimizer,
        lr=C.train.lr,
        muon_lr=C.train.muon_lr,
        weight_decay=C.train.weight_decay,
        scheduler=C.train.scheduler,
        warmup_ratio=C.train.warmup_ratio,
        ttt_steps=C.train.ttt_steps,
        ttt_decay=C.train.ttt_decay,
        ttt_warmup_epochs=C.train.ttt_warmup_epochs,
        noise=C.train.noise,
        seed=C.train.seed,
        trust=flag("trust-remote-code", C.verifier.trust_remote_code),
        code=code_hash("train"),
    shell:
        """
        python "$SCRIPTS/train.py" \
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
            --layer-ids {params.layer_ids} \
            --num-hidden-layers {params.num_hidden_layers} \
            --num-attention-heads {params.num_attention_heads} \
            --num-key-value-heads {params.num_key_value_heads} \
            --head-dim {params.head_dim} \
            --intermediate-size {params.intermediate_size} \
            --rope-theta {params.rope_theta} \
            --rope-scaling {params.rope_scaling:q} \
            --max-position-embeddings {params.max_position_embeddings} \
            --rms-norm-eps {params.rms_norm_eps} \
            --sliding-window {params.sliding_window} \
            --norms {params.norms} \
            {params.norm_before_residual} \
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
            --gpus {resources.gpu} \
            --checkpoint-every {resources.checkpoint_every}
        """
