# Installs the build tree into an empty folder, then configures, builds and runs a project that
# finds libzero there.
set(prefix ${WORK}/prefix)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nfailed (${result}):\n${output}")
  endif()
endfunction()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS=-O0 ${FLAGS}")
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer ${WORK}/checkpoints)
# A part of another project: configured, not built, since that takes minutes.
run(${CMAKE_COMMAND} -S ${SOURCE}/../embedded -B ${WORK}/embedded -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
  -DZERO=${SOURCE}/../../.. -DLIBTORCH=${LIBTORCH})
# The second starts zero-torch, which has to find libzero and libtorch.
run(${prefix}/bin/zero --version)
run(${prefix}/bin/zero train --help)
