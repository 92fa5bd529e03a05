"""LoRA adapters: reading PEFT folders, and the products of several adapters on a rank. Start with `product`."""
