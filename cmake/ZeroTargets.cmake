# How a layer and a program are declared.
#
#   zero_layer(name [TORCH] SOURCES ... [ALONE ...])
#       object library zero_<name> from the folder of the caller; ALONE names sources that no unity file may hold
#   zero_includes(target [TORCH])           include paths and definitions of any target that sees the layers
#   zero_use_torch(target)                  libtorch alone, for targets that see no layer
#   zero_test(name [TORCH] [TIMEOUT s] SOURCES ... [LAYERS ...] [LIBS ...])
#       links zero_core, with TORCH the whole library; with LAYERS zero_core and the objects of these runtime layers
#
# Core layers never see torch's headers: their include path has none. TORCH targets share one precompiled
# <torch/torch.h>.
option(ZERO_UNITY "Compile several sources of a layer as one; OFF shows missing includes" ON)

# file(CONFIGURE) leaves an unchanged file alone, so that configuring again compiles nothing.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_pch.cpp CONTENT "// Owns the precompiled torch header.\n")
add_library(zero_torch_pch OBJECT ${PROJECT_BINARY_DIR}/torch_pch.cpp)
target_link_libraries(zero_torch_pch PUBLIC torch::cpu)
target_precompile_headers(zero_torch_pch PUBLIC <torch/torch.h>)

find_package(GTest QUIET)

function(zero_use_torch target)
  target_link_libraries(${target} PRIVATE torch::cpu)
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
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;ALONE" ${ARGN})
  add_library(zero_${name} OBJECT ${ARG_SOURCES} ${ARG_ALONE})
  set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  if(ARG_TORCH)
    zero_includes(zero_${name} TORCH)
    set(batch 5)  # 5 files need about 2 GB of memory
  else()
    zero_includes(zero_${name})
    set(batch 10)
  endif()
  set_target_properties(zero_${name} PROPERTIES UNITY_BUILD ${ZERO_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

function(zero_test name)
  cmake_parse_arguments(ARG "TORCH" "TIMEOUT" "SOURCES;LAYERS;LIBS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(ZERO_SANITIZE)  # sanitized code is 5 to 20 times slower
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 10")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${name} PRIVATE ZERO_BINARY_DIR="${CMAKE_BINARY_DIR}" ZERO_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(ARG_TORCH)
    zero_includes(${name} TORCH)
  else()
    zero_includes(${name})
  endif()
  if(ARG_LAYERS)
    foreach(layer ${ARG_LAYERS})
      target_sources(${name} PRIVATE $<TARGET_OBJECTS:zero_${layer}>)
    endforeach()
    target_link_libraries(${name} PRIVATE zero_core torch::gomp ${CMAKE_DL_LIBS})
  elseif(ARG_TORCH)
    target_link_libraries(${name} PRIVATE zero torch::gomp)
  else()
    target_link_libraries(${name} PRIVATE zero_core torch::gomp)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} GTest::gtest GTest::gtest_main pthread)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  # What each case came to, for script/skipped-cases.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${name}.xml)
endfunction()
