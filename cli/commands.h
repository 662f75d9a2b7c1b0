// The subcommands. argv[0] is the subcommand's name. Each returns the exit code of the process and may throw the four
// errors (guarded() converts them to exit codes).
#pragma once

// In `zero`, without torch.
int zero_run(int argc, char** argv);
int zero_config(int argc, char** argv);
int zero_doctor(int argc, char** argv);
int zero_plan(int argc, char** argv);  // with --measure in `zero-torch`
int zero_report(int argc, char** argv);
int zero_models(int argc, char** argv);
int zero_reproduce(int argc, char** argv);
int zero_explain(int argc, char** argv);  // with --live in `zero-torch`

// In `zero-torch`, with torch. Weak: a program without one of them rejects its name.
[[gnu::weak]] int zero_train(int argc, char** argv);
[[gnu::weak]] int zero_bench(int argc, char** argv);
[[gnu::weak]] int zero_checkpoint(int argc, char** argv);
