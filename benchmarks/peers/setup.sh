#!/usr/bin/env bash
# Create the environments of the benchmarks' peers: torch, transformers and llama.cpp in one, EasyDeL in another.
#
#   benchmarks/peers/setup.sh [torch|jax|all]
#
# MLAFLAX_PEERS_VENV and MLAFLAX_PEERS_JAX_VENV name the folders (default .peers-venv and .peers-jax-venv in the
# checkout). llama-cpp-python is built from source: several CPU minutes, a C++ compiler and CMake needed.
set -euo pipefail
cd "$(dirname "$0")/../.."
torch_venv=${MLAFLAX_PEERS_VENV:-.peers-venv}
jax_venv=${MLAFLAX_PEERS_JAX_VENV:-.peers-jax-venv}
which=${1:-all}

create() {
  [ -x "$1/bin/python" ] || python3 -m venv "$1"
}

if [ "$which" = torch ] || [ "$which" = all ]; then
  create "$torch_venv"
  # torch first and pinned: what follows must not pull in another build of it.
  "$torch_venv/bin/pip" install torch==2.13.0
  "$torch_venv/bin/pip" install transformers==5.24.0 safetensors gguf==0.19.0 numpy
  # LLAVA_BUILD=OFF leaves out the image and audio models, a third of the build.
  CMAKE_ARGS=-DLLAVA_BUILD=OFF CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$torch_venv/bin/pip" install llama-cpp-python==0.3.36
fi
if [ "$which" = jax ] || [ "$which" = all ]; then
  create "$jax_venv"
  # This release of EasyDeL works with this jax, older than the library's own; it imports torch and pillow undeclared.
  "$jax_venv/bin/pip" install easydel==0.3.0 jax==0.9.2 jaxlib==0.9.2 torch==2.13.0 pillow
fi
