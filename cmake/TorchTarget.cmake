# Imported targets for an unpacked libtorch wheel, without find_package(Torch) and without a
# CUDA toolkit:
#   torch::cpu        libtorch_cpu + libc10
#   torch::gomp       the wheel's OpenMP run time
#   torch::gloo       torch::cpu plus gloo's headers (headers only: never also link a libgloo)
# ZERO_NVCC, the CUDA 13 compiler for the CUDA plug-in, empty without one, and ZERO_HAS_NCCL for the
# NCCL plug-in, if the toolkit's headers and NCCL are found.
# A project that has called find_package(Torch) keeps that copy: two in one process do not work.
include("${CMAKE_CURRENT_LIST_DIR}/TorchVersions.cmake")
list(GET ZERO_TORCH_MINORS 0 _torch_oldest)
list(GET ZERO_TORCH_MINORS -1 _torch_newest)
set(_torch_window "${_torch_oldest} to ${_torch_newest}")
set(_torch_default "${CMAKE_CURRENT_LIST_DIR}/../.deps/libtorch/torch")
if(TORCH_INSTALL_PREFIX)
  set(_torch_default "${TORCH_INSTALL_PREFIX}")
endif()
set(ZERO_TORCH_DIR "${_torch_default}" CACHE PATH "Folder 'torch' of an unpacked torch wheel")
get_filename_component(ZERO_TORCH_DIR "${ZERO_TORCH_DIR}" ABSOLUTE)
if(NOT EXISTS "${ZERO_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "ZERO_TORCH_DIR='${ZERO_TORCH_DIR}' has no lib/libtorch_cpu.so. "
    "Run script/setup, or give the folder 'torch' of an unpacked wheel of torch ${_torch_window}: -DZERO_TORCH_DIR=<site-packages>/torch")
endif()
file(STRINGS "${ZERO_TORCH_DIR}/include/torch/headeronly/version.h" _torch_version
  REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
# Another torch at the same place configures again.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${ZERO_TORCH_DIR}/include/torch/headeronly/version.h")
string(REGEX REPLACE "[^0-9]+([0-9]+)[^0-9]+([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2.\\3" ZERO_TORCH_VERSION "${_torch_version}")
string(REGEX REPLACE "\\.[0-9]+$" "" ZERO_TORCH_MINOR "${ZERO_TORCH_VERSION}")
if(NOT ZERO_TORCH_MINOR IN_LIST ZERO_TORCH_MINORS)
  message(FATAL_ERROR "libzero needs libtorch ${_torch_window}, found ${ZERO_TORCH_VERSION} in ${ZERO_TORCH_DIR}. Run script/setup.")
endif()
# Also for a project that this one is part of.
set(ZERO_TORCH_VERSION "${ZERO_TORCH_VERSION}" CACHE INTERNAL "")
set(ZERO_TESTED_TORCH "${ZERO_TESTED_TORCH}" CACHE INTERNAL "")
get_filename_component(_site "${ZERO_TORCH_DIR}/.." ABSOLUTE)

add_library(torch::cpu INTERFACE IMPORTED GLOBAL)
target_include_directories(torch::cpu INTERFACE
  "${ZERO_TORCH_DIR}/include" "${ZERO_TORCH_DIR}/include/torch/csrc/api/include")
# NDEBUG in every configuration: torch's inline code and some of its fields depend on it.
target_compile_definitions(torch::cpu INTERFACE NDEBUG USE_DISTRIBUTED USE_C10D_GLOO)
target_compile_features(torch::cpu INTERFACE cxx_std_20)
target_link_libraries(torch::cpu INTERFACE
  "${ZERO_TORCH_DIR}/lib/libtorch_cpu.so" "${ZERO_TORCH_DIR}/lib/libc10.so" pthread)
target_link_options(torch::cpu INTERFACE
  "LINKER:-rpath-link,${ZERO_TORCH_DIR}/lib" "LINKER:-rpath-link,${_site}/nvidia/cu13/lib")

# OpenMP's run time is the wheel's, so that there is one of it in the process; the compiler's own
# library of that name is only a stand-in for the linker.
if(NOT TARGET torch::gomp)
  add_library(torch::gomp INTERFACE IMPORTED GLOBAL)
  target_link_libraries(torch::gomp INTERFACE "${ZERO_TORCH_DIR}/lib/libgomp.so.1")
endif()

find_path(ZERO_GLOO_INCLUDE gloo/context.h DOC "Folder that has gloo/context.h (libgloo-dev)")
if(ZERO_GLOO_INCLUDE)
  add_library(torch::gloo INTERFACE IMPORTED GLOBAL)
  target_link_libraries(torch::gloo INTERFACE torch::cpu)
  if(NOT ZERO_GLOO_INCLUDE STREQUAL "/usr/include")  # -isystem /usr/include breaks <cstdlib>
    target_include_directories(torch::gloo INTERFACE "${ZERO_GLOO_INCLUDE}")
  endif()
endif()

set(ZERO_CUDA AUTO CACHE STRING "The CUDA and NCCL plug-ins: AUTO, ON or OFF")
if(NOT ZERO_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 13.0 QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    set(ZERO_NVCC "${CUDAToolkit_NVCC_EXECUTABLE}")
  endif()
  find_path(ZERO_NCCL_INCLUDE nccl.h PATHS "${_site}/nvidia/nccl/include" /usr/include /usr/local/cuda/include NO_DEFAULT_PATH)
  find_library(ZERO_NCCL_LIBRARY NAMES libnccl.so.2 PATHS "${_site}/nvidia/nccl/lib" /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} /usr/local/cuda/lib64 NO_DEFAULT_PATH)
  if(CUDAToolkit_FOUND AND ZERO_NCCL_INCLUDE AND ZERO_NCCL_LIBRARY)
    set(ZERO_HAS_NCCL TRUE)
  elseif(ZERO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ZERO_CUDA=ON, but the CUDA 13 toolkit, nccl.h or libnccl.so.2 was not found")
  endif()
endif()
