# Text files as functions of a program, so that a page's script and style are files that their own tools can read.
#
#   zero_embed_text(OUT FILE page/page.js FUNCTION zero::report::page_script HEADER report/html_page.h)
#       OUT becomes the name of a .cpp that defines `const char* page_script()`, byte for byte the file. HEADER declares it.
#       The .cpp is made during the build: an edited file is built in without configuring again.
#
# The same file is the script that the build runs (cmake -P): no other program is needed.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  function(zero_embed_text out)
    cmake_parse_arguments(ARG "" "FILE;FUNCTION;HEADER" "" ${ARGN})
    set(from ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_FILE})
    set(to ${CMAKE_CURRENT_BINARY_DIR}/${ARG_FILE}.cpp)
    set(script ${CMAKE_CURRENT_FUNCTION_LIST_FILE})
    add_custom_command(OUTPUT ${to} DEPENDS ${from} ${script} VERBATIM COMMENT "Embedding ${ARG_FILE}"
      COMMAND ${CMAKE_COMMAND} -DFROM=${from} -DTO=${to} -DFUNCTION=${ARG_FUNCTION} -DHEADER=${ARG_HEADER} -P ${script})
    set(${out} ${to} PARENT_SCOPE)
  endfunction()
  return()
endif()

file(READ "${FROM}" text)
string(FIND "${text}" ")embedded\"" end)
file(SIZE "${FROM}" size)
string(LENGTH "${text}" length)
# A string of CMake's ends at the first zero byte.
if(NOT end EQUAL -1 OR NOT length EQUAL size)
  message(FATAL_ERROR "${FROM} cannot be embedded: it has )embedded\" or a zero byte in it")
endif()
string(REGEX MATCH "^(.*)::([^:]+)$" matched "${FUNCTION}")
get_filename_component(name "${FROM}" NAME)
file(WRITE "${TO}" "// Made from ${name} by cmake/EmbedText.cmake: edit that file.\n#include \"${HEADER}\"\n\n"
  "namespace ${CMAKE_MATCH_1} {\nconst char* ${CMAKE_MATCH_2}() { return R\"embedded(${text})embedded\"; }\n}\n")
