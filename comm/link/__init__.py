"""Links by name, and emulated ones between processes of one machine. Start with `link` and `wire`."""
