"""The end of programs that measure memory: each case runs in a child, so none counts what another left."""

# After a definition of ``measure``. The arguments of its calls are JSON in the first argument of the program.
MEASURE_EACH = """
torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        measure(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""
