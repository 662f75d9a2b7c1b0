// The subcommands by name. argv[0] is the subcommand's word; each returns the exit code of the
// process and may throw the four errors (guarded() turns them into codes).
#pragma once

// Without torch, in `zero` itself.
int zero_run(int argc, char** argv);
int zero_config(int argc, char** argv);
int zero_doctor(int argc, char** argv);
int zero_plan(int argc, char** argv);
int zero_report(int argc, char** argv);
int zero_explain(int argc, char** argv);  // with --live in `zero-torch`

// With torch, in `zero-torch`. Weak: a program without one of them refuses the name.
[[gnu::weak]] int zero_train(int argc, char** argv);
[[gnu::weak]] int zero_bench(int argc, char** argv);
[[gnu::weak]] int zero_checkpoint(int argc, char** argv);
