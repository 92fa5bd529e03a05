"""Compares Tightwire with other programs on the same machine: vLLM, llama.cpp, transformers, accelerate, and the
device's own rates. Open ``run`` first; README.md says how to install the peers.
"""
