// `zero-torch`: the commands of the tools that need libtorch.
#include "tools/commands.h"
#include "tools/explain/live_ranks.h"
#include "tools/plan/measured_models.h"
#include "tools/support/program.h"

int main(int argc, char** argv) {
  return zero::cli::run_program("zero-torch",
                                {{"checkpoint", zero_checkpoint},
                                 {"explain", zero_explain},
                                 {"plan", zero_plan},
                                 {"explain-rank", zero::cli::explain_rank},
                                 {"plan-rank", zero::cli::plan_rank},
                                 {"torch-check", zero_torch_check}},
                                argc, argv);
}
