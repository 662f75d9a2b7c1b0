// `zero-train`: the program behind `zero train`.
#include "apps/finetune/train.h"
#include "tools/support/program.h"

int main(int argc, char** argv) { return zero::cli::run_program("zero-train", {{"train", zero_train}}, argc, argv); }
