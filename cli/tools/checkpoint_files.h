// The words of `zero checkpoint` that write or compare other libraries' files. argv[0] is the word.
#pragma once

namespace zero::cli {

int export_weights(int argc, char** argv);  // `export` and `convert`
int diff_checkpoints(int argc, char** argv);

}  // namespace zero::cli
