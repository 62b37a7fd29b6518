rule fetch_verifier:
    input:
        [local(C.verifier.chat_template)] if C.verifier.chat_template else [],
    output:
        folder=directory(f"{R}/verifier"),
        identity=f"{R}/verifier.json",
    log:
        f"{R}/logs/fetch_verifier.jsonl",
    localrule: True
    conda:
        ENV
    resources:
        runtime=120,
        mem_mb=SMALL_MB,
        disk_mb=NEEDS.verifier(),
    params:
        source=options.source(C.verifier),
        content=content(C.verifier, f"{R}/verifier.json", verifier=True),
        template=lambda wildcards, input: ["--chat-template", *input] if input else [],
        code=code_hash("fetch"),
    shell:
        """
        python "$SCRIPTS/fetch.py" \
            --kind verifier \
            {params.source:q} \
            {params.template:q} \
            --out {output.folder:q} \
            --identity {output.identity:q} \
            --log {log:q}
        """


for number, source in enumerate(C.conversations):

    rule:
        name:
            f"fetch_conversations_{number}"
        output:
            folder=directory(f"{R}/conversations/{number}"),
            identity=f"{R}/conversations/{number}.json",
        log:
            f"{R}/logs/fetch_conversations_{number}.jsonl",
        localrule: True
        conda:
            ENV
        resources:
            runtime=60,
            mem_mb=SMALL_MB,
            disk_mb=NEEDS.conversations(source),
        params:
            source=options.source(source),
            content=content(source, f"{R}/conversations/{number}.json"),
            code=code_hash("fetch"),
        shell:
            """
            python "$SCRIPTS/fetch.py" \
                --kind conversations \
                {params.source:q} \
                --out {output.folder:q} \
                --identity {output.identity:q} \
                --log {log:q}
            """


rule fetch_prompts:
    output:
        file=f"{R}/prompts",
        identity=f"{R}/prompts.json",
    log:
        f"{R}/logs/fetch_prompts.jsonl",
    localrule: True
    conda:
        ENV
    resources:
        runtime=60,
        mem_mb=SMALL_MB,
    params:
        source=options.source(C.prompts),
        content=content(C.prompts, f"{R}/prompts.json"),
        code=code_hash("fetch"),
    shell:
        """
        python "$SCRIPTS/fetch.py" \
            --kind prompts \
            {params.source:q} \
            --out {output.file:q} \
            --identity {output.identity:q} \
            --log {log:q}
        """
