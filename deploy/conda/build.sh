#!/bin/bash
# Run by rattler-build: PREFIX has the host packages, and conda-forge's libtorch has the layout of a wheel's folder torch.
set -euo pipefail
mkdir -p gloo-headers
ar p gloo.deb data.tar.xz | tar -xJ -C gloo-headers
# CMAKE_ARGS, a list of words, comes with the compiler.
# shellcheck disable=SC2086
cmake -G Ninja -S . -B build $CMAKE_ARGS -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$PREFIX" \
  -DCMAKE_INSTALL_LIBDIR=lib -DZERO_TORCH_DIR="$PREFIX" -DZERO_GLOO_INCLUDE="$PWD/gloo-headers/usr/include" \
  -DZERO_CUDA=OFF -DZERO_TESTS=OFF -DZERO_EXAMPLES=OFF -DZERO_BENCH=OFF
cmake --build build -j "$CPU_COUNT"
cmake --install build
