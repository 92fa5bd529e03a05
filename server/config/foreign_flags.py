"""A table of vLLM's and llama.cpp's flags: what Tightwire calls each, or where its value comes from here."""

from collections.abc import Iterable

# Keys: flags with one meaning. A value that begins with a dash is our flag; any other is a sentence.
VLLM = {
    "--tensor-parallel-size -tp": "--tp",
    "--data-parallel-size -dp": "--dp",
    "--enable-lora": "leave it out: --lora NAME=FOLDER or --lora-dir FOLDER is enough",
    "--lora-modules": "--lora",
    "--gpu-memory-utilization": "give bytes instead: --device-memory 20GiB, or --kv-cache-memory 4GiB",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--cpu-offload-gb": "use --weights stream, which keeps in host memory what the device does not hold",
    "--enforce-eager": "--no-cuda-graphs",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "use --prefix-cache none",
    "--enable-chunked-prefill": "leave it out: prompts longer than --max-num-batched-tokens are always computed in chunks",
    "--speculative-config": "use --speculation suffix, or draft with --draft-model MODEL",
    "--speculative-model": "use --speculation draft --draft-model MODEL, or suffix, which drafts from the text itself",
    "--distributed-executor-backend": "leave it out: `tightwire serve` starts its ranks",
    "--disable-custom-all-reduce": "use --allreduce native",
    "--load-format": "leave it out: the format is read from the files; random weights are --model random:SHAPE",
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--trust-remote-code": "leave it out: no code of a model is run",
    "--enable-auto-tool-choice --tool-call-parser": "leave it out: calls are found in the forms of docs/api.md that the model knows",
    "--reasoning-parser": "leave it out: what a model thinks is part of the content",
    "--root-path": "leave it out",
    "--allowed-origins": "--cors-origin",
}
LLAMA_CPP = {
    "-m -hf -hfr --hf-repo": "--model",
    "-a --alias": "--served-model-name",
    "-c --ctx-size": "--max-model-len",
    "-np --parallel": "--max-num-seqs",
    "-b --batch-size -ub --ubatch-size": "--max-num-batched-tokens",
    "-n --n-predict": "--max-tokens",
    "-p --prompt": "give the prompt without a flag",
    "--temp": "--temperature",
    "-s": "--seed",
    "-ts --tensor-split": "--tp-split",
    "-ngl --gpu-layers --n-gpu-layers": "use --device cuda; layers that do not fit stream (--stream-layers N)",
    "-t --threads": "leave it out: the cores are shared among the ranks of --tp",
    "-ctk --cache-type-k -ctv --cache-type-v": "use --kv-cache-dtype, for keys and values together",
    "-md --model-draft": "use --speculation draft --draft-model MODEL, or suffix, which drafts from the text itself",
    "--lora-scaled": "--lora",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "-sys --system-prompt": "--system",
    "--rpc": "start the same command on each host, with --nnodes, --node-rank and --master-addr",
    "--jinja": "leave it out: the model's chat template is always used",
}
OWNERS = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP}


def ours(flag: str, known: Iterable[str]) -> str | None:
    """The end of a message about another program's ``flag``; None: no such flag. ``known``: the flags of the verb."""
    for owner, table in OWNERS.items():
        text = next((text for theirs, text in table.items() if flag in theirs.split()), None)
        if text is not None and text.startswith("-"):
            where = "" if text in known else " of `tightwire serve`"
            return f"; {owner}'s {flag} is {text}{where}"
        if text is not None:
            return f", which is {owner}'s; {text}"
    return None
