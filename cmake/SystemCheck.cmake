# Ends the configuration on a system that libzero is not written for, before a compiler says so in its own way.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "libzero runs on Linux, found ${CMAKE_SYSTEM_NAME}. Hint: on macOS and Windows, build in a Linux container "
    "(deploy/Dockerfile), or in WSL 2.")
endif()
