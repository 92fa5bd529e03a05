"""LoRA adapters: reading PEFT folders, and the memory that holds several adapters on a rank. Start with `slots`."""
