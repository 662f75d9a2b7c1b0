// The words of `zero checkpoint` that read, write or compare other libraries' files. argv[0] is the word.
#pragma once
#include <string>

#include <zero/checkpoint_tools.h>

namespace zero::cli {

int export_weights(int argc, char** argv);  // `export` and `convert`
int import_files(int argc, char** argv);
int diff_checkpoints(int argc, char** argv);

class Command;
// Adds the options that say which tensors of a source are meant, and how to read them.
void declare_source(Command& command, SourceChoice& choice);
// What `inspect` prints of a source that is no checkpoint of libzero.
std::string source_text(const SourceInfo& info, const std::string& path, const Command& command);

}  // namespace zero::cli
