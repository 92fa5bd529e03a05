"""AllReduce algorithms, each in a file with its cost and registry entry; their names in one table. Start with `names` and `one_shot`."""
