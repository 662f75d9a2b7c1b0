# Programs and libraries for older systems, with this system's compiler: the C library and the symbols of libstdc++ are those of
# the folder .deps/oldest-glibc (script/wheel makes it). What libstdc++ has since then becomes a hidden part of each library.
set(_root "${CMAKE_CURRENT_LIST_DIR}/../../.deps/oldest-glibc")
cmake_path(NORMAL_PATH _root)
set(CMAKE_SYSROOT "${_root}")
# Without -B and -L the compiler takes start files and libraries from this system's folders first.
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT
    "-B${_root}/usr/lib/x86_64-linux-gnu -L${_root}/lib-first -L${_root}/usr/lib/x86_64-linux-gnu -Wl,--exclude-libs,libstdc++.a")
endforeach()
