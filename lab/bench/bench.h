// The measurements of `zero bench`, one function each; bench.cpp selects by name. argv[0] is the name. All throw the
// library's errors and return the exit code.
#pragma once

// `zero bench NAME ...`
int zero_bench(int argc, char** argv);

namespace zero::cli {

int bench_stages(int argc, char** argv);
int bench_step(int argc, char** argv);
int bench_experts(int argc, char** argv);
int bench_collectives(int argc, char** argv);
int bench_optimizer(int argc, char** argv);
int bench_activations(int argc, char** argv);
int bench_checkpoint(int argc, char** argv);
int bench_io(int argc, char** argv);
int bench_profile(int argc, char** argv);

// One rank of a measurement, as a separate process.
int bench_step_rank(int argc, char** argv);
int bench_experts_rank(int argc, char** argv);
int bench_collectives_rank(int argc, char** argv);
int bench_checkpoint_rank(int argc, char** argv);
int bench_profile_rank(int argc, char** argv);

}  // namespace zero::cli
