"""Llama layers, their split over ranks, their weights, cache and sampling; no requests, no HTTP. Start with `decoder`.

Shape suffixes, one legend for the whole repository. The letter names the logical dimension; a local shard keeps the
letter and the variable says ``local_``.

    B sequences in the batch     H query heads        V vocabulary
    T tokens in this step        K key/value heads    W ranks
    S cached tokens              E head dim           C chunk
    D hidden size                F MLP width          G quantization group
    N cache blocks               P tokens per block   R rows of logits
    L groups of layers           M blocks of a table
"""
