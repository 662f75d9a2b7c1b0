// The default random generator while zero::build makes a module. For bindings, whose programs seed it within a function
// that builds: make() of C++ must not, and calls torch::manual_seed before zero::build.
#pragma once
#include <zero/export.h>

namespace zero::detail {

// Around what reads, seeds or sets the default generator: lend_generator() gives every parameter that exists so far its
// values, so that the generator is where an eager build has it; after take_generator() recording continues from where
// the program has left it. [local] Outside of a build in this thread they do nothing.
ZERO_API void lend_generator();
ZERO_API void take_generator();

}  // namespace zero::detail
