# An overlay port inside libzero's tree (docs/deployment.md):
#
#   ZERO_TORCH_DIR=<site-packages>/torch vcpkg install libzero --overlay-ports=deploy/vcpkg
#
# libtorch is PyPI's: ZERO_TORCH_DIR, in the environment or in the triplet, is the folder `torch` of the unpacked wheel.
vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)
# The wheel has one configuration.
set(VCPKG_BUILD_TYPE release)
# libzero finds libtorch by its run path.
set(X_VCPKG_RPATH_KEEP_SYSTEM_PATHS ON)
if(NOT ZERO_TORCH_DIR)
  set(ZERO_TORCH_DIR "$ENV{ZERO_TORCH_DIR}")
endif()
if(NOT EXISTS "${ZERO_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "ZERO_TORCH_DIR='${ZERO_TORCH_DIR}' has no lib/libtorch_cpu.so, expected the folder 'torch' of a torch wheel")
endif()

get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)
vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS FEATURES cuda ZERO_CUDA)
# libzero links to its libraries by name.
set(ENV{CPLUS_INCLUDE_PATH} "${CURRENT_INSTALLED_DIR}/include")
set(ENV{LIBRARY_PATH} "${CURRENT_INSTALLED_DIR}/lib")
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    "-DZERO_TORCH_DIR=${ZERO_TORCH_DIR}"
    -DZERO_TESTS=OFF
    -DZERO_EXAMPLES=OFF
    -DZERO_BENCH=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME zero CONFIG_PATH lib/cmake/zero)
vcpkg_copy_tools(TOOL_NAMES zero zero-torch zero-train zero-lab AUTO_CLEAN)
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
