# How a layer, a program and a test are declared.
#
#   zero_layer(name [TORCH] SOURCES ...)   object library zero_<name> from src/<name>
#   zero_test(name [TORCH] [TIMEOUT s] SOURCES ... [LAYERS ...] [LIBS ...])
#       with LAYERS it links just those layers' objects, else the whole library
#
# TORCH targets share one precompiled <torch/torch.h>; the others never see torch's headers.
find_package(GTest QUIET)

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

function(zero_test name)
  cmake_parse_arguments(ARG "TORCH" "TIMEOUT" "SOURCES;LAYERS;LIBS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(ZERO_SANITIZE)  # sanitized code is 5 to 20 times slower
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 10")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR})
  target_compile_definitions(${name} PRIVATE NDEBUG ZERO_BINARY_DIR="${CMAKE_BINARY_DIR}" ZERO_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  if(ARG_TORCH)
    zero_use_torch(${name})
  endif()
  if(ARG_LAYERS)
    foreach(layer ${ARG_LAYERS})
      target_sources(${name} PRIVATE $<TARGET_OBJECTS:zero_${layer}>)
    endforeach()
    target_link_libraries(${name} PRIVATE torch::gomp hwy xxhash ${ZERO_URING_LINK} ${CMAKE_DL_LIBS})
  elseif(ARG_TORCH)
    target_link_libraries(${name} PRIVATE zero)
  else()
    target_link_libraries(${name} PRIVATE zero_core)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} GTest::gtest GTest::gtest_main pthread)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  # What each case came to, for script/skipped-cases.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${name}.xml)
endfunction()
