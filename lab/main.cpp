// `zero-lab`: the programs behind `zero bench` and `zero reproduce`.
#include "lab/bench/bench.h"
#include "lab/reproduce/reproduce.h"
#include "tools/support/program.h"

int main(int argc, char** argv) {
  using namespace zero::cli;
  return run_program("zero-lab",
                     {{"bench", zero_bench},
                      {"reproduce", zero_reproduce},
                      {"step-rank", bench_step_rank},
                      {"experts-rank", bench_experts_rank},
                      {"collectives-rank", bench_collectives_rank},
                      {"checkpoint-rank", bench_checkpoint_rank},
                      {"profile-rank", bench_profile_rank}},
                     argc, argv);
}
