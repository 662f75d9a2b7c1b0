// The measurements of `zero bench`, one function each; bench.cpp chooses by name.
#pragma once

namespace zero::cli {

// `zero bench stages`: argv[0] is the word "stages". Throws the library's errors.
int bench_stages(int argc, char** argv);

}  // namespace zero::cli
