# How a layer and a program are declared. Tests: ZeroTests.cmake.
#
#   zero_layer(name [TORCH|FAST] SOURCES ... [ALONE ...])
#       object library zero_<name> from the folder of the caller; FAST: what a step runs, or loops over elements; ALONE names
#       sources that no unity file may hold
#   zero_includes(target [TORCH])           include paths and definitions of any target that sees the layers
#   zero_use_torch(target)                  libtorch alone, for targets that see no layer
#
# Core layers never see torch's headers: their include path has none. TORCH targets share one precompiled header of what
# many of them include, the others another. <torch/torch.h> is not in it: of all that it includes GCC instantiates the
# templates again in each source, used or not, which takes 10 s; these take 6.
option(ZERO_UNITY "Compile several sources of a layer as one; OFF shows missing includes" ON)
# GCC takes a source of a unity file for a header.
set(ZERO_UNITY_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)

set(ZERO_TORCH_HEADERS <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/nn/cloneable.h> <torch/nn/init.h>
  <torch/nn/module.h> <torch/nn/modules/container/modulelist.h> <torch/nn/modules/container/sequential.h>
  <torch/nn/modules/embedding.h> <torch/nn/modules/linear.h> <torch/nn/modules/normalization.h> <torch/types.h>)

# What a step runs is optimized: FAST and TORCH. The rest, and tests, have -Og, which takes less time to compile
# (docs/testing.md).
add_library(zero_fast INTERFACE)
add_library(zero_torch_flags INTERFACE)
if(NOT ZERO_SANITIZE)
  target_compile_options(zero_fast INTERFACE $<$<CONFIG:Release>:-O2>)
  target_compile_options(zero_torch_flags INTERFACE $<$<CONFIG:Release>:-O1>)
endif()

# file(CONFIGURE) leaves an unchanged file alone, so that configuring again compiles nothing.
foreach(kind torch core)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/${kind}_pch.cpp CONTENT "// Owns the precompiled ${kind} header.\n")
  add_library(zero_${kind}_pch OBJECT ${PROJECT_BINARY_DIR}/${kind}_pch.cpp)
endforeach()
target_link_libraries(zero_torch_pch PUBLIC torch::cpu PRIVATE zero_torch_flags)
target_precompile_headers(zero_torch_pch PUBLIC ${ZERO_TORCH_HEADERS})
target_compile_definitions(zero_core_pch PRIVATE NDEBUG)
target_precompile_headers(zero_core_pch PUBLIC <nlohmann/json.hpp> <algorithm> <atomic> <chrono> <condition_variable>
  <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <set> <sstream> <string> <thread> <vector>)

function(zero_use_torch target)
  target_link_libraries(${target} PRIVATE torch::cpu zero_torch_flags)
  target_precompile_headers(${target} REUSE_FROM zero_torch_pch)
endfunction()

# All targets are compiled with the same definitions; otherwise they could not share a precompiled header.
function(zero_includes target)
  cmake_parse_arguments(ARG "TORCH" "" "" ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src/core)
  if(ARG_TORCH)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src/runtime)
    zero_use_torch(${target})
  elseif(ZERO_UNITY)
    target_precompile_headers(${target} REUSE_FROM zero_core_pch)
  endif()
  # Headers that mention NDEBUG must agree everywhere, also without torch.
  target_compile_definitions(${target} PRIVATE NDEBUG)
endfunction()

function(zero_layer name)
  cmake_parse_arguments(ARG "TORCH;FAST" "" "SOURCES;ALONE" ${ARGN})
  add_library(zero_${name} OBJECT ${ARG_SOURCES} ${ARG_ALONE})
  set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  if(ARG_TORCH)
    zero_includes(zero_${name} TORCH)
    set(batch 20)  # up to 3 GB of memory; each unity file instantiates torch's templates again
  else()
    zero_includes(zero_${name})
    if(ARG_FAST)
      target_link_libraries(zero_${name} PRIVATE zero_fast)
      set_target_properties(zero_${name} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # which have other flags
    endif()
    set(batch 10)
  endif()
  if(ZERO_UNITY)
    target_compile_options(zero_${name} PRIVATE ${ZERO_UNITY_OPTIONS})
  endif()
  set_target_properties(zero_${name} PROPERTIES UNITY_BUILD ${ZERO_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()
