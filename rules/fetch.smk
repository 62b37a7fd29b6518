rule fetch_verifier:
    output:
        folder=directory(f"{R}/verifier"),
        identity=f"{R}/verifier.json",
    log:
        f"{R}/logs/fetch_verifier.jsonl",
    conda:
        ENV
    resources:
        runtime=120,
    params:
        source=source_options(C.verifier),
        code=code_hash("fetch"),
    shell:
        """
        python "$SCRIPTS/fetch.py" \
            --kind verifier \
            {params.source:q} \
            --out {output.folder:q} \
            --identity {output.identity:q} \
            --log {log:q}
        """


rule fetch_conversations:
    output:
        file=f"{R}/conversations",
        identity=f"{R}/conversations.json",
    log:
        f"{R}/logs/fetch_conversations.jsonl",
    conda:
        ENV
    resources:
        runtime=60,
    params:
        source=source_options(C.conversations),
        code=code_hash("fetch"),
    shell:
        """
        python "$SCRIPTS/fetch.py" \
            --kind data \
            {params.source:q} \
            --out {output.file:q} \
            --identity {output.identity:q} \
            --log {log:q}
        """


rule fetch_prompts:
    output:
        file=f"{R}/prompts",
        identity=f"{R}/prompts.json",
    log:
        f"{R}/logs/fetch_prompts.jsonl",
    conda:
        ENV
    resources:
        runtime=60,
    params:
        source=source_options(C.prompts),
        code=code_hash("fetch"),
    shell:
        """
        python "$SCRIPTS/fetch.py" \
            --kind data \
            {params.source:q} \
            --out {output.file:q} \
            --identity {output.identity:q} \
            --log {log:q}
        """
