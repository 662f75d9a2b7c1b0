# Other systems than Linux are refused in one sentence, before a compiler is tried: by the library's project and by the
# Python package's, which pip configures.
foreach(project . python)
  foreach(system Darwin Windows)
    file(REMOVE_RECURSE ${WORK})
    execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/${project} -B ${WORK} -G ${GENERATOR} -DCMAKE_SYSTEM_NAME=${system}
      RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE errors)
    string(REGEX REPLACE "[ \n]+" " " text "${output}${errors}")
    if(result EQUAL 0 OR NOT text MATCHES "libzero runs on Linux, found ${system}\\." OR text MATCHES "compiler identification")
      message(FATAL_ERROR "${project} on ${system}: got ${result} and\n${output}${errors}\nexpected a refusal before a compiler is looked for")
    endif()
  endforeach()
endforeach()
file(REMOVE_RECURSE ${WORK})
