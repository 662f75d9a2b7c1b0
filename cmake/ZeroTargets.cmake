# How a layer and a program are declared. Tests: ZeroTests.cmake.
#
#   zero_layer(name [TORCH|FAST] SOURCES ... [ALONE ...])
#       object library zero_<name> from the folder of the caller; FAST: its own loops take time, so it has -O2; ALONE names
#       sources that no unity file may hold
#   zero_includes(target [TORCH])           include paths and definitions of any target that sees the layers
#   zero_use_torch(target)                  libtorch alone, for targets that see no layer
#
# Core layers never see torch's headers: their include path has none. TORCH targets share one precompiled header of what
# many of them include. <torch/torch.h> is not in it: of all that it includes GCC instantiates the templates again in
# each source, used or not, which takes 10 s; these take 6.
option(ZERO_UNITY "Compile several sources of a layer as one; OFF shows missing includes" ON)
# GCC takes a source of a unity file for a header.
set(ZERO_UNITY_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)

set(ZERO_TORCH_HEADERS <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/nn/cloneable.h> <torch/nn/init.h>
  <torch/nn/module.h> <torch/nn/modules/container/modulelist.h> <torch/nn/modules/container/sequential.h>
  <torch/nn/modules/embedding.h> <torch/nn/modules/linear.h> <torch/nn/modules/normalization.h> <torch/types.h>)

# -O1 takes a third less time to compile than -O2, which layers with loops over elements need (docs/testing.md).
add_library(zero_o1 INTERFACE)
target_compile_options(zero_o1 INTERFACE $<$<CONFIG:Release>:-O1>)

# file(CONFIGURE) leaves an unchanged file alone, so that configuring again compiles nothing.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_pch.cpp CONTENT "// Owns the precompiled torch header.\n")
add_library(zero_torch_pch OBJECT ${PROJECT_BINARY_DIR}/torch_pch.cpp)
target_link_libraries(zero_torch_pch PUBLIC torch::cpu PRIVATE zero_o1)
target_precompile_headers(zero_torch_pch PUBLIC ${ZERO_TORCH_HEADERS})

function(zero_use_torch target)
  target_link_libraries(${target} PRIVATE torch::cpu zero_o1)
  target_precompile_headers(${target} REUSE_FROM zero_torch_pch)
endfunction()

# All targets are compiled with the same definitions; otherwise they could not share a precompiled header.
function(zero_includes target)
  cmake_parse_arguments(ARG "TORCH" "" "" ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src/core)
  if(ARG_TORCH)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src/runtime)
    zero_use_torch(${target})
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
    set(batch 14)  # up to 2.5 GB of memory; each unity file instantiates torch's templates again
  else()
    zero_includes(zero_${name})
    if(NOT ARG_FAST)
      target_link_libraries(zero_${name} PRIVATE zero_o1)
    endif()
    set(batch 10)
  endif()
  if(ZERO_UNITY)
    target_compile_options(zero_${name} PRIVATE ${ZERO_UNITY_OPTIONS})
  endif()
  set_target_properties(zero_${name} PROPERTIES UNITY_BUILD ${ZERO_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()
