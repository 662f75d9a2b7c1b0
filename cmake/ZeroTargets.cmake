# How a layer is declared. Tests: ZeroTests.cmake.
#
#   zero_layer(name [TORCH] SOURCES ...)   object library zero_<name> from src/<name>
#
# TORCH targets share one precompiled <torch/torch.h>; the others never see torch's headers.
# file(CONFIGURE) leaves an unchanged file alone, so that configuring again compiles nothing.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/empty.cpp CONTENT "// A layer without sources yet.\n")
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/torch_pch.cpp CONTENT "// Owns the precompiled torch header.\n")
add_library(zero_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cpp)
target_link_libraries(zero_torch_pch PUBLIC torch::cpu)
target_precompile_headers(zero_torch_pch PUBLIC <torch/torch.h>)

function(zero_use_torch target)
  target_link_libraries(${target} PRIVATE torch::cpu)
  target_precompile_headers(${target} REUSE_FROM zero_torch_pch)
endfunction()

function(zero_layer name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LIBS" ${ARGN})
  if(NOT ARG_SOURCES)
    set(ARG_SOURCES ${CMAKE_BINARY_DIR}/empty.cpp)
  endif()
  add_library(zero_${name} OBJECT ${ARG_SOURCES})
  target_include_directories(zero_${name} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
  # Without torch too: headers that mention NDEBUG must agree everywhere.
  target_compile_definitions(zero_${name} PRIVATE NDEBUG)
  if(ARG_TORCH)
    zero_use_torch(zero_${name})
  endif()
  target_link_libraries(zero_${name} PRIVATE ${ARG_LIBS})
endfunction()
